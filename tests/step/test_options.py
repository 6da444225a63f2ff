"""Options: one table makes the parser and checks values, on a command line and from Python."""

from __future__ import annotations

import dataclasses

import pytest

from gluonpar.options import Options, num_bytes, option, parse, parser


@dataclasses.dataclass(frozen=True)
class Made(Options):
    about = "What the options are for."
    examples = "\nprogram --size 4K\n"

    size: int = option(
        1024, "a size (%(default)s)", "SIZE", least=4, most=4 << 20, convert=num_bytes
    )
    rate: float | None = option(None, "a rate", least=0)
    counts: tuple[int, ...] = option((1, 2), "some counts", "N,...", least=1)
    names: tuple[str, ...] | None = option(None, "some names", "A,B", choices=("a", "b"))
    kind: str = option("x", "a kind", choices=("x", "y"), group="others")
    flag: bool = option(False, "a flag")


@pytest.mark.parametrize(
    ("argv", "values"),
    [
        ([], {"size": 1024, "rate": None, "counts": (1, 2), "names": None, "flag": False}),
        (["--size", "4K", "--flag"], {"size": 4096, "flag": True}),
        (["--size=1m", "--counts", "3, 1,3", "--names", "b,a"], {"size": 1 << 20}),
        (["--counts", "3,1,3", "--rate", "1e-3"], {"counts": (3, 1, 3), "rate": 0.001}),
        (["--names", "b,a", "--kind", "y"], {"names": ("b", "a"), "kind": "y"}),
    ],
)
def test_a_command_line_makes_what_a_call_makes(argv, values):
    made, _ = parse(Made, argv)
    assert {name: getattr(made, name) for name in values} == values
    assert made == Made(
        **{field.name: getattr(made, field.name) for field in dataclasses.fields(made)}
    )


REFUSED = [
    ("--size 3", {"size": 3}),
    ("--size 8M", {"size": 8 << 20}),
    ("--size 4Q", {"size": "4Q"}),
    ("--rate nan", {"rate": float("nan")}),
    ("--rate inf", {"rate": float("inf")}),
    ("--rate -1,2", {"rate": "-1,2"}),
    ("--counts -1,2", {"counts": [-1, 2]}),
    ("--counts 1.5", {"counts": (1.5,)}),
    ("--counts ,", {"counts": "1,2"}),
    ("--names a,c", {"names": ["a", "c"]}),
    ("--names c", {"names": "a"}),
    ("--kind z", {"kind": "z"}),
]


@pytest.mark.parametrize(("argv", "values"), REFUSED, ids=[argv for argv, _ in REFUSED])
def test_what_is_refused_names_the_option_on_a_command_line_and_the_name_in_a_call(
    argv, values, capsys
):
    with pytest.raises(SystemExit) as ended:
        parse(Made, argv.split(" "), prog="program")
    out, err = capsys.readouterr()
    flag, value = argv.split(" ")
    assert (ended.value.code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("program: error: ") and flag in err
    with pytest.raises((TypeError, ValueError), match=f"^{flag[2:]} must "):
        Made(**values)


def test_the_help_has_every_option_under_its_heading(capsys):
    text = parser(Made, "program").format_help()
    assert all(f"--{field.name}" in text for field in dataclasses.fields(Made))
    assert "others:\n  --kind {x,y}" in text and "a size (1024)" in text
    assert "examples:\n  program --size 4K" in text
