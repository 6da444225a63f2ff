"""For tests of benchmarks: run a command line in this process."""

import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[2]


def runner(script, capsys):
    """Return run(*arguments), which returns exit code, lines on stdout, lines on stderr."""

    def run(*arguments):
        try:
            code = script.main([str(argument) for argument in arguments])
        except SystemExit as exit_:
            code = exit_.code
        out, err = capsys.readouterr()
        return code, out.splitlines(), err.splitlines()

    return run


def expect_one_line(outcome, words):
    """Check a refused request: exit code 2, no output but one error with these words."""
    code, out, err = outcome
    assert (code, out, len(err)) == (2, [], 1)
    assert "error: " in err[0]
    assert words in err[0]
