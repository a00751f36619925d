"""Entry point of every rank: ``deepspeed --module so_tui_trainer``. Guarded, since spawned Adam
workers import it and must not train.
"""

import sys

if __name__ == "__main__":
    from so_tui_trainer.entry import main

    sys.exit(main())
