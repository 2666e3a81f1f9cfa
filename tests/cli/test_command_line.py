"""Flags: declared once, parsed from text, every violation of a line in one message."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from metrale_async.arguments import argument, violations
from metrale_async.cli import main
from metrale_async.cli.environment import VARIABLES, environment_violations
from metrale_async.cli.parsing import CommandLine, Positional
from metrale_async.engine.engine_args import EngineArgs
from metrale_async.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class KitchenArgs:
    """One flag of every kind."""

    dish: str = "soup"
    portions: int = argument(4, group="Amounts", help="how many eat", minimum=1, maximum=10)
    salt_grams: float | None = argument(None, group="Amounts", help="100% salt", minimum=0.5, maximum=9, auto=True)
    style: str = argument("plain", group="Manner", help="how", choices=("plain", "fancy"))
    spice: tuple[str, ...] = argument((), group="Manner", help="what goes in")
    cook: str | None = argument(None, group="Manner", help="who")
    hot: bool = argument(True, group="Manner", help="served hot")
    offset: int = argument(0, group="Manner", help="any integer")

    def __post_init__(self) -> None:
        found = violations(self)
        if self.style == "fancy" and self.portions > 8:
            found.append("--style fancy is for up to 8 --portions")
        if found:
            raise ConfigurationError(found)


KITCHEN = CommandLine("cook", "Cooks.", positionals=[Positional("dish", "what", "soup")], configurations=[KitchenArgs])


def cook(*line: str) -> KitchenArgs:
    return KITCHEN.parse(line, {}).of(KitchenArgs)


def refusals(*line: str, environment: dict[str, str] | None = None) -> tuple[str, ...]:
    with pytest.raises(ConfigurationError) as refused:
        KITCHEN.parse(line, environment or {})
    return refused.value.violations


def test_an_empty_line_gives_the_declared_defaults() -> None:
    assert cook() == KitchenArgs()


def test_every_kind_of_flag_is_read() -> None:
    line = "stew --portions 8 --salt-grams=1.5 --style fancy --spice dill --spice bay --cook Ann --no-hot --offset -3"
    assert cook(*line.split()) == KitchenArgs(
        dish="stew",
        portions=8,
        salt_grams=1.5,
        style="fancy",
        spice=("dill", "bay"),
        cook="Ann",
        hot=False,
        offset=-3,
    )


def test_auto_is_a_value_where_declared_and_nowhere_else() -> None:
    assert cook("--salt-grams", "auto").salt_grams is None
    assert "--portions is 'auto', not an integer" in refusals("--portions", "auto")[0]


@pytest.mark.parametrize("portions", ["0", "11", "-1"])
def test_a_value_beyond_a_limit_is_refused_with_the_range(portions: str) -> None:
    assert refusals("--portions", portions) == (f"--portions is {portions}; allowed: 1 to 10",)


@pytest.mark.parametrize("portions", ["1", "2", "9", "10"])
def test_a_value_at_a_limit_is_accepted(portions: str) -> None:
    assert cook("--portions", portions).portions == int(portions)


@pytest.mark.parametrize("salt", ["nan", "inf", "-inf"])
def test_a_number_that_is_not_finite_is_refused(salt: str) -> None:
    assert "--salt-grams is" in refusals(f"--salt-grams={salt}")[0]


def test_all_violations_of_a_line_come_in_one_error() -> None:
    found = refusals(
        *("--portion", "3", "--portions", "x", "--salt-grams", "99", "--style", "rustic", "--cook", "--hot=yes"),
        *("stew", "extra"),
        environment={"METRALE_KERNEL": "cpu"},
    )
    assert sorted(found) == sorted(
        [
            "environment variable METRALE_KERNEL is not known; did you mean METRALE_KERNELS?",
            "--portion is not a flag of cook; did you mean --portions?",
            "--portions is 'x', not an integer; allowed: 1 to 10",
            "--salt-grams is 99.0; allowed: 0.5 to 9, or auto",
            "--style is 'rustic'; allowed: one of plain, fancy",
            "--cook needs a value: any text",
            "--hot takes no value; use --hot or --no-hot",
            "extra is one word too many",
        ]
    )


def test_a_combination_is_refused_beside_other_violations() -> None:
    found = refusals("--style", "fancy", "--portions", "9", "--offset", "one")
    assert "--style fancy is for up to 8 --portions" in found
    assert len(found) == 2


def test_the_value_of_an_unknown_flag_is_not_taken_for_a_word() -> None:
    assert refusals("--cok", "Ann", "stew") == ("--cok is not a flag of cook; did you mean --cook?",)


def test_flags_are_not_abbreviated() -> None:
    assert refusals("--por", "3")


def test_a_value_of_any_length_is_refused_in_a_short_message() -> None:
    (message,) = refusals("--portions", "9" * 100_000)
    assert len(message) < 300


def test_help_names_every_flag_with_group_range_and_default() -> None:
    text = " ".join(KITCHEN.format_help().split())
    for words in (
        "Amounts:",
        "--portions N how many eat (1 to 10; default: 4)",
        "--salt-grams X 100% salt (0.5 to 9, or auto; default: auto)",
        "--style {plain,fancy} how (default: plain)",
        "--spice TEXT what goes in (may be repeated)",
        "--hot, --no-hot served hot (default: on)",
        "DISH what (default: soup)",
    ):
        assert words in text


def test_the_engine_flags_are_those_of_its_configuration() -> None:
    line = CommandLine("serve", "Serves.", positionals=[Positional("model", "which")], configurations=[EngineArgs])
    parsed = line.parse(["here", "--max-seq-len", "64", "--dtype", "float32", "--max-batch-size", "auto"], {})
    assert parsed.of(EngineArgs) == EngineArgs(model="here", max_seq_len=64, dtype="float32")


@pytest.mark.parametrize(
    ("environment", "found"),
    [
        ({"PATH": "/bin", "METRALE": "x"}, []),
        ({"METRALE_MODELS_DIR": "/models", "METRALE_KERNELS": "reference"}, []),
        (
            {"METRALE_KERNELS": "gpu"},
            ["environment variable METRALE_KERNELS is 'gpu'; allowed: one of auto, reference, cpu"],
        ),
        (
            {"METRALE_MODEL_DIR": "/models"},
            ["environment variable METRALE_MODEL_DIR is not known; did you mean METRALE_MODELS_DIR?"],
        ),
        (
            {"metrale_kernels": "cpu"},
            ["environment variable metrale_kernels is not known; did you mean METRALE_KERNELS?"],
        ),
        (
            {"METRALE_X": "1"},
            [f"environment variable METRALE_X is not known; declared: {', '.join(sorted(VARIABLES))}"],
        ),
    ],
)
def test_an_undeclared_variable_is_refused_by_name(environment: dict[str, str], found: list[str]) -> None:
    assert environment_violations(environment) == found


def test_a_wrong_line_ends_with_code_2_and_one_message(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("METRALE_KERNELZ", "cpu")
    assert main(["bench", "ladder", "--rounds", "0", "--concurrency", "1,x", "--url", "example.com"]) == 2
    message = capsys.readouterr().err
    assert "4 things are wrong" in message
    for words in ("METRALE_KERNELZ", "--rounds is 0", "--concurrency is '1,x'", "--url is 'example.com'"):
        assert words in message


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ([], 2, "commands:"),
        (["sevre"], 2, "did you mean serve?"),
        (["models"], 2, "models pull"),
        (["models", "pul"], 2, "did you mean models pull?"),
        (["xyzzy"], 2, "there are: serve"),
    ],
)
def test_a_wrong_command_is_answered_with_the_right_ones(
    line: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line) == code
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("line", [["--help"], ["models", "--help"], ["help"]])
def test_the_overview_goes_to_standard_output(line: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line) == 0
    assert "commands:" in capsys.readouterr().out
