"""The processes of a job: who they are, how they agree, and how a failure of one reaches all."""
