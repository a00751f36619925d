"""The commands of ``so-tui``. Every command's function takes the parsed arguments and returns an
exit code.
"""
