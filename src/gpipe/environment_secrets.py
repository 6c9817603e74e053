"""Secrets in the environment, such as the key of Weights & Biases: recognise them, so that none is written down."""

import os
import re

_NAME = re.compile(
    r"(?:^|_)(?:key|keys|token|tokens|secret|secrets|credential|credentials|passphrase|pwd)(?:_|$)"
    r"|password|passwd|apikey|token$|secret$",
    re.IGNORECASE,
)
_NO_SECRETS = {"PWD", "OLDPWD", "GPG_KEY"}  # two folders; the public key that a Python image was built with
_SHORTEST = 8  # characters; otherwise KEY=1 would make every 1 a secret
# The prefixes of services' tokens, and a password in an address.
_TOKEN = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|gh[opsur]_[A-Za-z0-9]{30,}|github_pat_\w{30,}|glpat-[\w-]{20,}|A[KS]IA[0-9A-Z]{16}\b"
    r"|sk-[A-Za-z0-9_-]{24,}|xox[abp]-[\w-]{10,}|wandb_v1_\w{20,})"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"
)


def find_secret(text: str) -> str | None:
    """Say what in a text is a secret, without repeating it; None if there is none.

    A secret is the value of an environment variable whose name contains a word such as key, token, secret or password;
    anything that looks like a well-known service's token or a private key; or a password in an address.
    """
    for value, name in _list_secrets():
        if value in text:
            return f"the value of the environment variable {name}"
    return "what looks like a token or a password" if _TOKEN.search(text) else None


def is_secret(name: str) -> bool:
    """Return whether an environment variable of this name is a secret."""
    return name not in _NO_SECRETS and _NAME.search(name) is not None


def redact(text: str) -> str:
    """Return a text with each secret replaced by <name of its variable>, or by <secret> if it has none."""
    for value, name in _list_secrets():
        text = text.replace(value, f"<{name}>")
    return _TOKEN.sub("<secret>", text)


def _list_secrets() -> list[tuple[str, str]]:
    """Return the secrets in the environment and their names, longest first: one may be part of another."""
    found = [(value, name) for name, value in os.environ.items() if len(value) >= _SHORTEST and is_secret(name)]
    return sorted(found, key=lambda pair: (-len(pair[0]), pair))
