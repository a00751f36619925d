"""The only code that depends on DeepSpeed's internals. ``engine`` checks the version."""
