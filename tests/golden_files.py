"""What the scripts share that make golden files."""

import importlib.metadata
import json
import sys


def need(versions):
    """Stops where other packages are installed than made the files."""
    found = {name: importlib.metadata.version(name).split("+")[0] for name in versions}
    if found != versions:
        sys.exit(f"{sys.argv[0]}: found {found}; the files are made with {versions}")


def text_of(value, indent="\n"):
    """JSON with a line for each object without objects in it."""
    if isinstance(value, dict) and any(isinstance(each, dict) for each in value.values()):
        lines = [f"{indent} {json.dumps(key)}: {text_of(each, indent + ' ')}" for key, each in value.items()]
        return "{" + ",".join(lines) + indent + "}"
    return json.dumps(value, separators=(",", ":"))


def write_or_check(files, usage):
    """Writes the texts of `files`, by path; with --check they are there already."""
    if sys.argv[1:] == ["--check"]:
        wrong = [str(path) for path, text in files.items() if path.read_bytes() != text.encode()]
        sys.exit(f"{sys.argv[0]}: not as the script makes them: {', '.join(wrong)}" if wrong else 0)
    if sys.argv[1:]:
        sys.exit(usage)
    for path, text in files.items():
        path.write_bytes(text.encode())
