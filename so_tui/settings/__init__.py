"""The user's own settings: what ``settings.toml`` holds, reading it, and changing it."""
