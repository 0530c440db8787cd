"""The configuration: what is read, and how each mistake is answered."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from megatrain.config import Config, PolicySection, Section, TrainSection, describe_keys, load_config, save_config
from megatrain.config.described_keys import section_of
from megatrain.config.load import keys_here, without_counterpart
from megatrain.errors import ConfigError
from megatrain.optim import LrSchedule
from megatrain.spec import Numerics, Policy
from megatrain.spec.work import MOST_TOKENS
from tests.bad_paths import FOR_A_FILE, FOR_A_FOLDER, KINDS, bad_path

HERE = Path(__file__).parents[2]
MINIMAL = """\
model:
  config: {model_type: llama, rope_theta: 1e6}
data:
  sources: python-stdlib
  tokenizer: bytes
train:
  steps: 10
  learning_rate: 3e-4
output: {folder: runs/test}
"""


def load(tmp_path: Path, text: str = MINIMAL, *overrides: str) -> Config:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return load_config(path, overrides)


def refusal(tmp_path: Path, text: str = MINIMAL, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, *overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message.replace(f"{tmp_path}/", "")


def test_a_minimal_file_is_enough(tmp_path: Path) -> None:
    config = load(tmp_path)
    assert config.train.steps == 10
    assert config.data.sources == ("python-stdlib",)
    assert config.policy.overrides == {}
    assert config.tokenizer == "bytes"


def test_floats_may_be_written_without_a_dot(tmp_path: Path) -> None:
    config = load(tmp_path)
    assert config.train.learning_rate == 3e-4
    assert config.model.config == {"model_type": "llama", "rope_theta": 1e6}


def test_overrides_beat_the_file_and_the_last_one_wins(tmp_path: Path) -> None:
    config = load(tmp_path, MINIMAL, "train.learning_rate=1e-3", "train.steps=5", "train.learning_rate=2e-3")
    assert (config.train.learning_rate, config.train.steps) == (2e-3, 5)


def test_a_pattern_on_the_command_line_needs_no_quotes_for_yaml(tmp_path: Path) -> None:
    config = load(tmp_path, MINIMAL, "data.pattern=*.md", "train.freeze=*", "train.no_decay=*norm*")
    assert (config.data.pattern, config.train.freeze, config.train.no_decay) == ("*.md", ("*",), ("*norm*",))


def test_learning_rates_are_named_by_patterns(tmp_path: Path) -> None:
    config = load(tmp_path, MINIMAL, 'train.learning_rates={"*embed_tokens*": 1e-5, "*norm*": 0}')
    assert config.train.learning_rates == {"*embed_tokens*": 1e-5, "*norm*": 0.0}
    wrong = {
        '["*norm*"]': "should be a mapping of keys to values, not ['*norm*']",
        '{"*norm*": fast}': "valid number",
        '{"*norm*": -1}': "greater",
    }
    for rates, what in wrong.items():
        assert what in refusal(tmp_path, MINIMAL, f"train.learning_rates={rates}")
    message = refusal(tmp_path, MINIMAL, "train.learning_rates={lm_head.weight: 1}", "train.learning_rate=0")
    assert "learning_rates follow learning_rate, which is 0; freeze" in message


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("data.sources={a: b}", "data.sources: should be a list, not {'a': 'b'}"),
        ("data.chat_template=null", "data.chat_template: should be a valid string, not null"),
        ("resume=yes", "valid string, not true, as YAML reads yes, no, on and off; put a text in quotes"),
        ("train.steps=yes", "train.steps: should be a valid integer, not true"),
        ("train.objective=reward", "train.objective: reward models are not supported; use TRL's RewardTrainer, or dpo"),
    ],
)
def test_a_wrong_value_is_told_in_the_words_of_the_file(tmp_path: Path, override: str, told: str) -> None:
    message = refusal(tmp_path, MINIMAL, override)
    assert told in message
    assert "tuple" not in message


def test_an_override_may_replace_a_whole_section(tmp_path: Path) -> None:
    config = load(tmp_path, MINIMAL, "train={steps: 3}", "policy.weight_slots=4", "data.sources=[a, b]")
    assert (config.train.steps, config.train.learning_rate) == (3, TrainSection.model_fields["learning_rate"].default)
    assert config.policy.overrides == {"weight_slots": 4}
    assert config.data.sources == ("a", "b")


def test_auto_fixes_nothing_and_can_be_overridden(tmp_path: Path) -> None:
    text = MINIMAL + "policy: auto\n"
    assert load(tmp_path, text).policy == PolicySection()
    assert load(tmp_path, text, "policy.activations=keep").policy.overrides == {"activations": "keep"}


def test_the_tokenizer_defaults_to_the_models(tmp_path: Path) -> None:
    config = load(tmp_path, MINIMAL, "model={path: some/model}", "data.tokenizer=null")
    assert config.tokenizer == "some/model"


CHARACTERS = st.characters(exclude_categories=["Cs"], exclude_characters="\0~")
TEXTS = st.text(CHARACTERS, max_size=20) | st.sampled_from(["3e-4", "null", "yes", "1_0", "a\x85b", "\u2028", "\ufeff"])


@given(
    prompt=TEXTS,
    lr=st.just(0.0) | st.floats(1e-30, 1),
    slots=st.none() | st.integers(1, 9),
    theta=st.floats(1e-30, 1e30),
)
def test_a_saved_config_round_trips(
    tmp_path_factory: pytest.TempPathFactory, prompt: str, lr: float, slots: int | None, theta: float
) -> None:
    folder = tmp_path_factory.mktemp("saved")
    config = Config.model_validate(
        {
            "model": {"config": {"model_type": "llama", "rope_theta": theta, "name": prompt}},
            "data": {"sources": [prompt or "x"], "tokenizer": "bytes"},
            "train": {"steps": 1, "learning_rate": lr, "sample_prompts": prompt},
            "policy": {"weight_slots": slots},
            "output": {"folder": "here"},
        }
    )
    save_config(config, folder / "deep" / "config.yaml")
    assert load_config(folder / "deep" / "config.yaml") == config


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        (MINIMAL, ("train.learning_rat=1",), "unknown key train.learning_rat; did you mean train.learning_rate?"),
        (MINIMAL.replace("learning_rate", "lr"), (), "run.yaml:8: unknown key train.lr; in MegaTrain it is train"),
        (MINIMAL.replace("steps:", "eps: 0\n  stps:"), (), "run.yaml:8: unknown key train.stps (1 more to correct)"),
        (MINIMAL + "trian: {}\n", (), "run.yaml:10: unknown key trian; did you mean train?"),
        (MINIMAL, ("window=3",), "override 'window=3': unknown key window; in MegaTrain it is data.sequence_length"),
        (MINIMAL, ("policy.weight_slot=3",), "unknown key policy.weight_slot; did you mean policy.weight_slots?"),
        (MINIMAL, ("checkpoint_every=3",), "unknown key checkpoint_every; did you mean checkpoint.every?"),
        (MINIMAL, ("train.checkpoint_every=3",), "did you mean checkpoint.every?"),
        (MINIMAL, ("output.zzzzzz=3",), "the keys of output are folder, overwrite"),
        (MINIMAL.replace("steps: 10", "steps: ten"), (), "run.yaml:7: train.steps: should be a valid integer, not 'te"),
        (MINIMAL, ("train.steps=1.5",), "override 'train.steps=1.5': train.steps: should be a valid integer, not 1.5"),
        (MINIMAL, ("train.epochs=2",), "train: needs exactly one of `steps` and `epochs` (passes over the data); both"),
        (MINIMAL, ("train.warmup_steps=5", "train.warmup_ratio=0.1"), "warmup_steps and warmup_ratio are both set"),
        (MINIMAL, ("train.epochs=0", "train.steps=null"), "train.epochs: should be greater than 0, not 0"),
        (MINIMAL, ("train.steps=0",), "train.steps: should be greater than 0, not 0"),
        (MINIMAL, ("train.learning_rate=.nan",), "train.learning_rate: should be a finite number, not nan"),
        (MINIMAL, ("train.lr_scheduler=cosin",), "should be 'constant', 'cosine', 'linear' or 'wsd', not 'cosin'"),
        (MINIMAL, ("output.trackers=[mlflow]",), "output.trackers"),
        (MINIMAL, ("train.betas=[0.9]",), "train.betas: has too few values"),
        (MINIMAL, ("train.optimizer=lion", "train.eps=1e-6"), "train: lion has no eps; leave it out"),
        (MINIMAL, ("train.muon.momentum=0.9",), "train: muon.momentum has no effect without optimizer=muon; set that"),
        (MINIMAL, ("train.optimizer=muon", "train.muon.adjust=original"), "train: the learning rates of muon.adjust=o"),
        (MINIMAL, ("train.optimizer=muon", "train.muon.cut={a: 1}"), "train.muon.cut: should be greater than or equal"),
        (MINIMAL, ("train.betas=[0.9, 1.0]",), "train.betas: should be less than 1, not 1.0"),
        (MINIMAL, ("train=3",), "override 'train=3': train: needs keys below it, not 3"),
        (MINIMAL, ("policy.activations=foo",), "policy.activations: should be 'keep' or 'recompute', not 'foo'"),
        (MINIMAL, ("data.sources=[]",), "data.sources: is empty; give at least one"),
        (MINIMAL, ("train.betas=[0.9, 0.9, 0.9]",), "train.betas: has too many values; give 2"),
        (MINIMAL, ("data.streaming=true", "train.steps=null", "train.epochs=2"), "no known length; set train.steps"),
        (MINIMAL, ("data.streaming=true", "data.validation_fraction=0.1"), "data: nothing can be held out of a stream"),
        (MINIMAL, ("data.streaming=true", "data.sources=[a/b, a/c]"), "several streamed sources have no known length"),
        (MINIMAL, ("data.streaming=true", "train.objective=dpo"), "train.objective=dpo cannot stream its data"),
        (MINIMAL, ("data.weights=[1, 2]",), "data: data.weights needs one weight per source; there are 1 in"),
        (MINIMAL, ("train.global_batch_size=5", "train.micro_batch_size=2"),
         "train: global_batch_size=5 is no multiple of micro_batch_size=2"),
        (MINIMAL, ("train.energy=1",), "unknown key train.energy; the keys of train are steps"),
        (MINIMAL, ("train.grad_clip=1",), "unknown key train.grad_clip; in MegaTrain it is train.max_grad_norm"),
        (MINIMAL, ("adapter.type=prefix",), "adapter.type: should be 'lora', not 'prefix'"),
        (MINIMAL, ("adapter.r=0",), "adapter.r: should be greater than 0, not 0"),
        (MINIMAL, ("adapter.path=x", "adapter.r=8"), "adapter: the adapter at `path` brings its own"),
        (MINIMAL, ("adapter.r=8", "train.freeze=['*']"), "with an adapter the model is frozen anyway"),
        (MINIMAL, ("policy.homes=x",), "unknown key policy.homes; the planner decides where state lives, within mem"),
        (MINIMAL + "a: *.md", (), "run.yaml:10: malformed YAML (expected alphabetic or numeric character, but found "
         "'.'); put text that begins with *, & or ! in quotes"),
        (MINIMAL, ("model.path=x",), "run.yaml:1: model: needs exactly one of `path`"),
        (MINIMAL, ("model.config=null",), "run.yaml:1: model: needs exactly one of `path`"),
        (MINIMAL, ("data.tokenizer=null",), "a fresh model has no tokenizer; set data.tokenizer"),
        (MINIMAL.replace("  steps: 10\n", ""), (), "run.yaml:6: train: needs exactly one of `steps` and `epochs`"),
        (MINIMAL, ("train.steps",), "'train.steps': is not KEY=VALUE"),
        (MINIMAL, ("train..steps=1",), "'train..steps=1': is not KEY=VALUE"),
        (MINIMAL, ("train.betas=[0.9",), "override 'train.betas=[0.9': malformed YAML"),
        (MINIMAL + "  a: [1\n", (), "run.yaml:10: malformed YAML"),
        (MINIMAL + "a: \x00", (), "run.yaml: malformed YAML"),
        (MINIMAL + "a: 2026-99-99", (), "run.yaml: malformed YAML"),
        (MINIMAL + "a: &x {b: *x}", (), "run.yaml: malformed YAML"),
        (MINIMAL + "a: " + "[" * 2000, (), "run.yaml: malformed YAML"),
        (MINIMAL + "train: {steps: 3}\n", (), "run.yaml:10: key train is given twice"),
        (MINIMAL.replace("steps: 10", "steps: 10\n  steps: 11"), (), "run.yaml:8: key train.steps is given twice"),
        ("", (), "run.yaml: contains no keys"),
        ("- a\n", (), "run.yaml: contains no keys"),
        ("1: 2\n", (), "model is missing"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_with_its_location(
    tmp_path: Path, text: str, overrides: tuple[str, ...], expected: str
) -> None:
    assert expected in refusal(tmp_path, text, *overrides)


READ = (
    "model.path",
    "model.config",
    "data.sources",
    "data.chat_template",
    "data.tokenizer",
    "train.hardware",
    "adapter.path",
    "lm_eval.folder",
    "resume",
)
FOLDERS = ("data.cache", "disk.folders", "checkpoint.folder", "output.folder")
FILES = ("trace",)
NO_PATHS = (
    *("data.format", "data.tags", "data.pattern", "data.packing", "memory.disk", "output.overwrite"),
    *("output.trackers_online", "lm_eval.tasks"),
)
"""Their meanings speak of files and folders all the same."""

BAD_PATHS = [
    (key, kind, says)
    for keys, kinds in ((READ, {}), (FOLDERS, FOR_A_FOLDER), (FILES, FOR_A_FILE))
    for key in keys
    for kind, says in {**KINDS, **kinds}.items()
]


@pytest.mark.parametrize(("key", "kind", "says"), BAD_PATHS)
def test_unusable_paths_are_refused_in_every_key(
    key: str, kind: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = json.dumps(bad_path(kind, tmp_path, monkeypatch))
    lists = key in ("data.sources", "disk.folders")
    value = f"{{path: {text}}}" if key == "model.path" else f"[{text}]" if lists else text
    override = f"model={value}" if key == "model.path" else f"{key}={value}"
    message = refusal(tmp_path, MINIMAL, override)
    assert key in message
    assert says in message
    assert len(message) < 600
    assert message.isprintable()


def test_a_file_in_place_of_the_checkpoint_folder_is_refused(tmp_path: Path) -> None:
    config = load(tmp_path, MINIMAL, f"output.folder={tmp_path}")
    assert config.checkpoints == tmp_path / "checkpoints"
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(ConfigError, match="checkpoints: is a file, not a folder"):
        _ = config.checkpoints
    (tmp_path / "checkpoints").unlink()
    (tmp_path / "checkpoints").symlink_to(tmp_path / "checkpoints")
    with pytest.raises(ConfigError, match="checkpoints: cannot be reached"):
        _ = config.checkpoints


NEEDED = {"lm_eval": ("lm_eval.tasks=[some]",), "train.muon": ("train.optimizer=muon",)}
"""Section -> what its keys are refused without."""


def test_path_keys_round_trip(tmp_path: Path) -> None:
    for key in (*READ[2:], *FOLDERS, *FILES):
        config = load(tmp_path, MINIMAL, f"{key}={tmp_path}/new", *NEEDED.get(key.partition(".")[0], ()))
        save_config(config, tmp_path / "saved.yaml")
        assert load_config(tmp_path / "saved.yaml") == config
        assert f"{tmp_path}/new" in (tmp_path / "saved.yaml").read_text()


def test_every_path_key_is_covered() -> None:
    spoken = re.compile(r"\b([Ff]olders?|[Ff]iles?|path)\b")
    speak = {each.key for each in describe_keys() if spoken.search(each.meaning)}
    assert speak - {*NO_PATHS} <= {*READ, *FOLDERS, *FILES}


def numbers_of(section: type[Section], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(key, type) of every key that may be a number or a list of numbers."""
    for name, field in section.model_fields.items():
        if (inside := section_of(field.annotation)) is not None:
            yield from numbers_of(inside, f"{prefix}{name}.")
        elif re.search(r"\b(int|float)\b", str(field.annotation)):
            yield f"{prefix}{name}", field.annotation


NUMBERS = dict(numbers_of(Config))
SEVERAL = {"adapter.trainable_token_indices": 1, "data.weights": 1, "train.betas": 2}
"""Keys of lists of numbers, with how many there are."""


@pytest.mark.parametrize("key", NUMBERS)
def test_unreasonable_numbers_are_refused_in_every_key(key: str, tmp_path: Path) -> None:
    whole = "int" in str(NUMBERS[key])
    for value in (10**30, 2**63, -(10**30)) if whole else ("1e300", "5e-324", "-1e300"):
        text = f"[{', '.join([str(value)] * SEVERAL[key])}]" if key in SEVERAL else str(value)
        text = f"{{'*norm*': {value}}}" if "dict[str, " in str(NUMBERS[key]) else text
        message = refusal(tmp_path, MINIMAL, f"{key}={text}")
        assert key in message
        assert re.search(r"is out of range; give |should be (less|greater) than ", message)


def test_accepted_numbers_fit_machine_words(tmp_path: Path) -> None:
    bounded = {"data.workers": 64, "train.target_tokens_per_step": MOST_TOKENS, "train.sample_tokens": 10**6}
    for key, kind in NUMBERS.items():
        if "int" in str(kind):
            value: object = bounded.get(key, 10**18)
            value = [value] * SEVERAL[key] if key in SEVERAL else value
            value = {"*": 1 << 20} if key == "train.muon.cut" else value
            needed = NEEDED["train.muon"] if key.startswith("train.muon.") else NEEDED.get(key.partition(".")[0], ())
            load(tmp_path, MINIMAL, f"{key}={value}", *needed)
    assert len(NUMBERS) > 40


def test_a_missing_file_suggests_the_nearest_name(tmp_path: Path) -> None:
    (tmp_path / "quickstart.yaml").write_text(MINIMAL)
    with pytest.raises(ConfigError, match=r"no such file or folder; did you mean .*quickstart\.yaml\?"):
        load_config(tmp_path / "quikstart.yaml")
    with pytest.raises(ConfigError, match="no such file"):
        load_config(tmp_path / "absent" / "x.yaml")


def test_binary_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "a.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path)


def test_every_key_has_a_description_and_a_valid_default() -> None:
    keys = describe_keys()
    assert all(each.meaning for each in keys)
    assert [each.key for each in keys if not each.default] == ["data.sources", "output.folder"]
    defaults = {each.key: yaml.safe_load(each.default) for each in keys if each.default}
    assert defaults["train.betas"] == [0.9, 0.95]
    assert defaults["data.pattern"] == "*"
    assert defaults["train.max_grad_norm"] == 1.0
    assert defaults["model.path"] is None


def test_other_trainers_key_names_are_answered_with_ours_or_a_reason(tmp_path: Path) -> None:
    known, said = (
        {each.key for each in describe_keys()},
        " ".join([*keys_here().values(), *without_counterpart().values()]),
    )
    sections = {key.partition(".")[0] for key in known if "." in key}
    assert set(re.findall(rf"\b(?:{'|'.join(sections)})\.[a-z_]+", said)) <= known
    for name, answer in {
        "learning_rate": "in MegaTrain it is train.learning_rate",
        "lr": "in MegaTrain it is train.learning_rate",
        "num_train_epochs": "in MegaTrain it is train.epochs",
        "per_device_train_batch_size": "in MegaTrain it is train.micro_batch_size",
        "cutoff_len": "in MegaTrain it is data.sequence_length",
        "max_seq_length": "in MegaTrain it is data.sequence_length",
        "lora_r": "in MegaTrain it is adapter.r",
        "load_in_4bit": "; a frozen base is held in bfloat16",
        "deepspeed": "; state streams from host memory",
        "embedding_lr": "in MegaTrain it is train.learning_rates",
        "use_ema": "; no average of weights is kept; keep checkpoints by",
        "load_best_model_at_end": "in MegaTrain it is output.best",
        "early_stopping_patience": "in MegaTrain it is train.early_stopping_patience",
    }.items():
        (tmp_path / "run.yaml").write_text(f"{name}: 1\n")
        with pytest.raises(ConfigError) as caught:
            load_config(tmp_path / "run.yaml")
        assert f"unknown key {name}" in str(caught.value)
        assert answer in str(caught.value)


def test_every_key_shows_its_type() -> None:
    kinds = {each.key: each.kind for each in describe_keys()}
    assert {key: kinds[key] for key in TAKEN} == TAKEN
    assert not [key for key, kind in kinds.items() if "typing" in kind or "class" in kind]


TAKEN = {
    "train.lr_scheduler": "constant | cosine | linear | wsd",
    "train.steps": "whole number of 1 or more, or null",
    "train.epochs": "number above 0, 1,000,000 at most, or null",
    "train.learning_rate": "number of 0 or more",
    "train.min_lr_ratio": "number from 0 to 1",
    "train.betas": "2 of: number from 0 to below 1",
    "policy.kernels": "stock | fused, or null",
    "data.sources": "list of: text",
    "data.validation": "names and their values",
    "model.verify": "true or false",
    "memory.host": "whole number of 1 or more, or text, or null",
}


def test_the_policy_section_mirrors_the_policy() -> None:
    """But for what `train.precision`, the device and memory decide."""
    elsewhere = {"precision", "shares_memory", "placements"}
    assert (
        set(PolicySection.model_fields)
        == {field.name for each in (Numerics, Policy) for field in fields(each)} - elsewhere
    )


def test_every_lr_scheduler_can_be_chosen() -> None:
    annotation: Any = TrainSection.model_fields["lr_scheduler"].annotation
    assert get_args(annotation) == get_args(get_type_hints(LrSchedule)["name"])


@pytest.mark.parametrize("path", sorted((HERE / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_configs_are_valid(path: Path) -> None:
    load_config(path)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"train": {"early_stopping_threshold": 0.1}}, "early_stopping_threshold needs early_stopping_patience"),
        ({"lm_eval": {"every": 5, "limit": 3}}, "every, limit has no effect without tasks"),
    ],
)
def test_a_key_that_needs_another_is_refused_without_it(changed: dict[str, Any], told: str, tmp_path: Path) -> None:
    tree: dict[str, Any] = {
        "model": {"path": "org/model"},
        "data": {"sources": ["x.txt"], "sequence_length": 32},
        "train": {"steps": 1},
        "output": {"folder": str(tmp_path / "run")},
    }
    for section, values in changed.items():
        tree[section] = {**tree.get(section, {}), **values}
    (tmp_path / "run.yaml").write_text(json.dumps(tree))
    with pytest.raises(ConfigError, match=told):
        load_config(tmp_path / "run.yaml")
