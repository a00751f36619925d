from __future__ import annotations

import pytest

from so_tui.trust.text import HIDDEN, recordable, without_credentials

SECRETS = {
    "SLURM_JWT": "eyJhbGciOi.secret.x",
    "HF_PAT": "hf_x",
    "HF_CREDS": "a:b",
    "HF_HUB_PWD": "pw",
    "HF_TOKEN": "hf_x",
    "WANDB_API_KEY": "k",
    "AWS_SECRET_ACCESS_KEY": "k",
    "SSH_AUTH_SOCK": "/tmp/agent",
    "DS_TOKEN": "x",
    "CUDA_SECRET": "x",
    "SLURM_SPANK_TOKEN": "x",
    "TORCH_HUB_TOKEN": "x",
    "UCX_PASSWORD": "x",
    "MKL_LICENCE_KEY": "x",
}


def test_only_listed_variables_are_recorded() -> None:
    harmless = {
        "NCCL_DEBUG": "INFO",
        "OMP_NUM_THREADS": "71",
        "SLURM_JOB_ID": "7",
        "HF_HOME": "/scratch/hf",
    }
    assert recordable(harmless | SECRETS) == harmless


def test_values_lose_their_credentials_and_stay_bounded() -> None:
    recorded = recordable(
        {
            "HF_ENDPOINT": "https://user:pw@mirror.example/hf?token=x#y",
            "LD_LIBRARY_PATH": "x" * 9999,
        }
    )
    assert recorded["HF_ENDPOINT"] == f"https://{HIDDEN}@mirror.example/hf?{HIDDEN}"
    assert len(recorded["LD_LIBRARY_PATH"]) == 4096


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("no URL: a@b.example?", "no URL: a@b.example?"),
        ("via http://u:p@proxy:8080 failed", f"via http://{HIDDEN}@proxy:8080 failed"),
        (
            "git+https://token@host/x and s3://key:secret@bucket/y",
            f"git+https://{HIDDEN}@host/x and s3://{HIDDEN}@bucket/y",
        ),
        ("'https://host/a?sig=1' 404", f"'https://host/a?{HIDDEN}' 404"),
        ("https://host/a@b", "https://host/a@b"),
        ("https://host:8080/a@b", "https://host:8080/a@b"),
        ("https://user:p@ss@proxy:8080", f"https://{HIDDEN}@proxy:8080"),
        ("https://user:pa#ss?x@proxy:8080", f"https://{HIDDEN}@proxy:8080"),
        ("s3://key:ab/cd+ef@bucket/y", f"s3://{HIDDEN}@bucket/y"),
        ("hf_abcdefghijklmnopqrstuvwxyz", HIDDEN),
        ("hf_model", "hf_model"),
    ],
)
def test_credentials_are_hidden_and_the_rest_stays(text: str, shown: str) -> None:
    assert without_credentials(text) == shown
