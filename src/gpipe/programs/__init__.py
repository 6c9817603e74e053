"""The programs: what happens between the checked settings and what a run leaves behind."""
