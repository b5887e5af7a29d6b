#!/usr/bin/env python3
"""What `sluice schedule --format json` prints, against its JSON schema.

    tests/runtime/program/explore/schema_test.py SLUICE

The schema knows each key: one that a command prints and the schema lacks fails, and so does a report without
one that it requires. Exits 1 where anything is otherwise.
"""

import json
import pathlib
import subprocess
import sys

import jsonschema

SCHEMA = pathlib.Path(__file__).resolve().parents[4] / "runtime/program/explore/schedule_output.schema.json"
COMMANDS = (
    "",
    "--schedule zb-v --ranks 3 --micro-batches 5 --message-time 0.5 --timeline",
    "--ranks 2 --timeline --activation-bytes 5 --message-bytes 2 --bandwidth 3 --reduce-time 1",
    "--schedule forward-only --queues nccl",
    "--ranks 1024 --micro-batches 2048",
    "auto --ranks 2 --micro-batches 4 --effort 1000",
    "auto --ranks 2 --micro-batches 4 --layers 5 --objective span --effort 0 --chunks 1,2,64",
    "compare --ranks 2 --micro-batches 4",
    "compare --schedules 1f1b,zb-v,auto --weight-activation-bytes 4",
)


def main():
    schema = json.loads(SCHEMA.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for command in COMMANDS:
        run = subprocess.run([sys.argv[1], "schedule", *command.split(), "--format", "json"], capture_output=True,
                             text=True)
        if run.returncode != 0:
            sys.exit(f"{command}: {run.stderr}")
        output = json.loads(run.stdout)
        for error in validator.iter_errors(output):
            sys.exit(f"{command}: {[(e.message[:200], list(e.path)) for e in error.context] or error.message[:400]}")
        for key in ("makespan", "rows"):
            if key in output and validator.is_valid({k: v for k, v in output.items() if k != key}):
                sys.exit(f"{command}: the schema does not miss '{key}'")
        if validator.is_valid({**output, "unknown": 1}):
            sys.exit(f"{command}: the schema takes any key")


if __name__ == "__main__":
    main()
