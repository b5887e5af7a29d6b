#!/usr/bin/env bash
# The names of all cases of GoogleTest in a build, one a line: program, suite and case. What a change adds, moves and loses:
#
#   tests/case_names.sh build/release >before        # then the change, and a build
#   diff before <(tests/case_names.sh build/release)
set -euo pipefail
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
find "$1/tests" -type f -executable -name '*_test' | sort | while read -r program; do
  "$program" --gtest_list_tests </dev/null | sed 's/ *#.*//' |
    awk -v program="$(basename "$program")" '/^[^ ].*\.$/ { suite = $1 } /^  / { print program, suite $1 }'
done
