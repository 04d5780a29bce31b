from pathlib import Path


def resolve(source, *a, **k):
    return Path(source)
