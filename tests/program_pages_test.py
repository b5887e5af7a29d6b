#!/usr/bin/env python3
"""The manual page and the completion for bash against the options that the program has.

    tests/program_pages_test.py SLUICE MAN BASH

Every option of every command's --help is in both, and no other; the completion is asked by bash itself.
man and groff, where they are installed, warn of nothing in the page. Exits 1 after a violation.
"""

import os
import re
import shutil
import subprocess
import sys


def output_of(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def complete(script, *words):
    """What bash offers for the last of `words`."""
    asked = 'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _sluice; printf "%s\\n" "${COMPREPLY[@]}"'
    return set(output_of("bash", "-c", asked, "bash", script, *words).split())


def compare(what, found, wanted):
    if found == wanted:
        return []
    return [f"{what}: lacks {sorted(wanted - found)}, has {sorted(found - wanted)} of no option"]


def main():
    sluice, page, script = sys.argv[1:4]
    failures = []
    with open(page, encoding="utf-8") as file:
        man = file.read().replace("\\-", "-").replace("\\:", "")
    sections = dict(re.findall(r"^\.SH (.*)\n((?:(?!\.SH ).*\n)*)", man, re.MULTILINE))
    commands = re.findall(r"^  (\w+) ", output_of(sluice, "--help"), re.MULTILINE)
    failures += compare("completion of commands", complete(script, "sluice", ""), {*commands, "--help", "--version"})
    options = choices = 0
    for command in commands + ["schedule auto", "schedule compare"]:
        words = command.split()
        help_text = output_of(sluice, *words, "--help")
        wanted = set(re.findall(r"^(?:  )?(--[\w-]+)(?=[ \n])", help_text, re.MULTILINE))
        options += len(wanted)
        section = sections.get(f"SLUICE {command.upper()}", "")
        failures += compare(f"manual of {command}", set(re.findall(r"^\\fB(--[\w-]+)", section, re.MULTILINE)), wanted)
        failures += compare(f"completion of {command}", complete(script, "sluice", *words, "--"), wanted | {"--help"})
        # The legal words of an option; others leave it to bash, which offers files.
        for name, placeholder in re.findall(r"^  (--[\w-]+) (\S+)", help_text, re.MULTILINE):
            legal = {word for word in placeholder.split("|") if not re.search("[A-Z]", word)}
            legal = legal if "|" in placeholder else set()
            choices += len(legal)
            for asked in ([name, ""], [name, "="], [name, "=", ""])[:3 if legal else 1]:
                failures += compare(f"{command} {' '.join(asked)}", complete(script, "sluice", *words, *asked), legal)
    if options < 100 or choices < 30:
        failures.append(f"only {options} options and {choices} words were found in --help")

    environment = {**os.environ, "LC_ALL": "C.UTF-8", "MANWIDTH": "80", "MANROFFSEQ": ""}
    for checker in (["man", "--warnings", "-Tutf8", "-l", page], ["groff", "-man", "-ww", "-Tutf8", "-z", page]):
        if shutil.which(checker[0]) is None:
            print(f"{checker[0]} is not installed: the page was not formatted by it")
            continue
        run = subprocess.run(checker, capture_output=True, text=True, env=environment)
        if run.returncode != 0 or run.stderr:
            failures.append(f"{checker[0]}: {run.stderr.strip()}")

    for line in failures:
        print(line)
    print(f"{options} options, {choices} words, {len(failures)} violations")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
