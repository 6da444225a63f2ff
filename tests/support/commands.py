"""Run the command line of a module in this process."""


def runner(module, capsys):
    """Return run(*arguments), which returns exit code, lines on stdout, lines on stderr."""

    def run(*arguments):
        try:
            code = module.main([str(argument) for argument in arguments])
        except SystemExit as exit_:
            code = exit_.code
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return code, out.splitlines(), err.splitlines()

    return run
