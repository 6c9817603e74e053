"""The processes of a job: which there are, how they agree, and how a failure of one reaches all.

job.py               a job of one process; mesh_job.py, of several, with the same methods
devices.py           which device each stage has
messages.py          small messages, such as the parts of a gathered value
errors.py            errors that say where they happened
watch.py             watches the others; board.py has the notices they leave
activity.py          what this process is doing, in words
device_work.py       what its GPUs have not finished
host_memory.py       memory for what goes over sockets
sockets.py           connections within one host
"""
