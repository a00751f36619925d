"""What each command of ``so-tui`` does. Every function takes the parsed arguments and returns an exit code of the contract."""
