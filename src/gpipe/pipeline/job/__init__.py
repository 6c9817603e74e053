"""The processes of a job: which there are, how they agree, and how a failure of one reaches all."""
