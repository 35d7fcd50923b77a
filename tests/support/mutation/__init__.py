"""Mutation testing: small faults are put into the package, and the tests have to notice them.

A change of the suite must not make it weaker, so the same faults are run on both suites:

    python -m tests.support.mutation choose --out m.json
    cp -r . /tmp/marked && python -m tests.support.mutation mark --tree /tmp/marked --mutants m.json
    cd /tmp/marked && GANGLION_TOUCHED=/tmp/touched PYTHONPATH=$PWD python -m pytest \
        -n 2 --dist loadfile -m "not slow" --junitxml=/tmp/junit.xml
    python -m tests.support.mutation durations --junit /tmp/junit.xml --out durations.json
    python -m tests.support.mutation run --tree COPY --mutants m.json --touched /tmp/touched \
        --order fast-first durations.json --json results.json

The marked run records which tests execute the function of which mutant. Processes of tests know
their test by PYTEST_CURRENT_TEST, too.
"""
