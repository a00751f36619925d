"""What ``deepspeed --module so_tui_trainer`` starts on every rank. Thin and guarded: spawned Adam workers must not train again."""

import sys

if __name__ == "__main__":
    from so_tui_trainer.entry import main

    sys.exit(main())
