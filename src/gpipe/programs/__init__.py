"""What each program does with its checked settings."""
