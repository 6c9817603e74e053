"""The processes of a job: who they are, how they agree, and what is said when one fails."""
