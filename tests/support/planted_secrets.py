"""Secrets in the environment of a run, and what of them or of the run others could see."""

from __future__ import annotations

from pathlib import Path

SECRETS = {
    "SLURM_JWT": "canary-jwt",
    "HF_PAT": "canary-pat",
    "HF_CREDS": "canary-creds",
    "HF_HUB_PWD": "canary-pwd",
    "WANDB_API_KEY": "canary-key",
    "TORCH_HUB_TOKEN": "canary-token",
    "HTTPS_PROXY": "https://user:canary-proxy@proxy.invalid:8080",
    "HF_ENDPOINT": "https://user:canary@end/point@mirror.invalid/hf?canary-query",
}


def secrets_in(folder: Path) -> list[str]:
    """Return the files below a folder that hold a secret."""
    return [
        str(path) for path in folder.rglob("*") if path.is_file() and b"canary" in path.read_bytes()
    ]


def open_to_others(folder: Path) -> list[tuple[str, str]]:
    """Return what others than the owner can open, a folder itself included, with its mode."""
    return [
        (str(path), oct(path.stat().st_mode))
        for path in (folder, *folder.rglob("*"))
        if path.stat().st_mode & 0o077
    ]
