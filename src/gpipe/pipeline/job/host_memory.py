"""Memory of the host, for whatever goes over sockets and Gloo."""

import functools

import torch

allocate_on_host = functools.partial(torch.empty, device=torch.device("cpu"))  # whatever the user's default device is
