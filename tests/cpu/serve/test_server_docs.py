"""docs/serving.md says what is there: every flag, route and metric, and no other."""

import re
from dataclasses import fields
from pathlib import Path

import typer

from truegate.cli import app
from truegate.config import EngineConfig

PAGE = (Path(__file__).parents[3] / "docs" / "serving.md").read_text()


def flags_of(*verbs: str) -> set[str]:
    group = typer.main.get_command(app)
    options = [one for verb in verbs for one in group.commands[verb].params if one.param_type_name == "option"]
    return {flag for one in options for flag in (*one.opts, *one.secondary_opts) if flag.startswith("--")}


def test_every_flag_of_serve_is_documented_and_every_documented_one_exists():
    ours = flags_of("serve", "bench", "chat")
    foreign = PAGE.split("```console\n$ guidellm")[1].split("```")[0]
    named = set(re.findall(r"--[a-z][a-z-]+", PAGE.replace(foreign, "")))
    assert not named - ours - {"--help"}
    positive = {flag for flag in flags_of("serve") if not flag.startswith("--no-")}
    missing = {flag for flag in positive if flag not in named and f"--no-{flag[2:]}" not in named}
    assert not missing - {"--help"}


def test_serve_has_every_setting_of_the_engine_at_its_default():
    """The offline `LLM` takes EngineConfig's fields; what the command line leaves out is named here."""
    flags = {one.name: one.default for one in typer.main.get_command(app).commands["serve"].params}
    ours = {one.name: one.default for one in fields(EngineConfig) if one.name not in ("page_size", "self_test")}
    assert {name: flags.get(name, "no flag") for name in ours} == ours


def test_every_route_and_engine_metric_is_documented(fake):
    for path in fake.get("/openapi.json").json()["paths"]:
        assert f"{path}`" in PAGE, path
    families = re.findall(r"^# TYPE truegate:(\w+) ", fake.get("/metrics").text, re.M)
    assert len(families) > 20
    missing = [name for name in families if not re.search(rf"`{name}[`{{]", PAGE)]
    assert not missing
