"""What each program does between its checked settings and the files that it leaves."""
