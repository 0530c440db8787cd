"""TRL's own SFT tests, run with its stock trainer or with the streamed one, without the Hugging Face hub.

The tests load small models and data sets from the hub by name. TRL's source has the scripts that created these, so
`make_hub` runs the scripts and saves what they would upload: models in the layout of the hub's local cache, where
`from_pretrained` finds them by name, and data sets in a folder that this file's `load_dataset` reads. The tokenizers
that the scripts would download are trained here on TRL's own text, with TRL's copies of the chat templates.

As a script, `python trl_suite.py TRL_SOURCE FOLDER` creates the hub. As a pytest plugin (`-p trl_suite`) it runs TRL's
tests on it; `test_trl_suite.py` shows how, and which environment variables it needs.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

HUB, MODE, REPORT = "MEGATRAIN_TRL_HUB", "MEGATRAIN_TRL_MODE", "MEGATRAIN_TRL_REPORT"
"""Environment variables of the plugin: the folder of `make_hub`, one of `MODES`, and the file for the outcomes."""

MODES = ("stock", "as written", "loaded")
"""TRL's own trainer; the streamed one with each test's own argument, mostly a name; and with the loaded model."""

TEMPLATES = {
    "Qwen/Qwen2.5": ("qwen2_5", "<|im_end|>"),
    "Qwen/Qwen3": ("qwen3", "<|im_end|>"),
    "openai/gpt-oss": ("gptoss", "<|return|>"),
    "zai-org/GLM-4.5": ("glm4moe", "<|user|>"),
    "meta-llama/Llama-3.2": ("llama3_2", "<|eot_id|>"),
    "CohereLabs/tiny-aya": ("cohere2", "<|END_OF_TURN_TOKEN|>"),
    "nvidia/NVIDIA-Nemotron-3-Nano": ("nemotron_3_nano", "<|im_end|>"),
    "LiquidAI/LFM2.5": ("lfm2_2_5", "<|im_end|>"),
    "LiquidAI/LFM2-": ("lfm2", "<|im_end|>"),
}
"""Start of a model's name -> TRL's file with its chat template, and its end-of-turn token. Others have no template."""


OF_TOKENIZER = {
    "vocab_size": "len(tokenizer.vocab)",
    "bos_token_id": "None",
    "eos_token_id": "tokenizer.eos_token_id",
    "pad_token_id": "tokenizer.pad_token_id",
}
"""Fields of a config that depend on the tokenizer. The scripts have those of the tokenizers they would download."""


# The hub ----------------------------------------------------------------------------------------------------------


def make_hub(source: Path, folder: Path) -> None:
    """Create the models and data sets that the SFT tests in `source` use, with the scripts there."""
    import datasets
    import transformers

    sys.path.insert(0, str(source))
    wanted = (source / "tests" / "test_sft_trainer.py").read_text()
    tokenizers: dict[str, Any] = {}

    def tokenizer(name: str, **_: Any) -> Any:
        if name not in tokenizers:
            tokenizers[name] = make_tokenizer(source, name)
        return tokenizers[name]

    def keep_data(data: Any, repo: str, config_name: str) -> None:
        if "tools" in data["train"].column_names:  # they are strings in the hub's copy
            data = data.map(lambda row: {"tools": json.dumps(row["tools"])})
        data.save_to_disk(str(folder / "datasets" / repo / config_name))

    def keep_model(model: Any, tokenizer: Any, generation: Any, *around: str) -> None:
        keep(
            folder, "-".join(["trl-internal-testing/" + around[0], type(model).__name__, *around[1:]]), model, tokenizer
        )

    with mock.patch.object(datasets.DatasetDict, "push_to_hub", keep_data):
        for script in ("zen", "zen_image", "harmony", "toolcall"):
            made = runpy.run_path(str(source / "scripts" / f"generate_{script}_dataset.py"))
            repo = "trl-internal-testing/" + script.replace("_", "-")
            made["main"](test_size=0.1, push_to_hub=True, repo_id=repo)
    from scripts.generate_tiny_models import _common

    transformers.set_seed(0)
    nothing = mock.Mock(return_value=None)
    with (
        mock.patch.multiple(
            _common,
            check_transformers_version=nothing,
            check_dtype_pattern=nothing,
            print_config_diff=nothing,
            smoke_test=nothing,
            push_to_hub=keep_model,
        ),
        mock.patch.object(transformers.AutoTokenizer, "from_pretrained", tokenizer),
        mock.patch.object(transformers.GenerationConfig, "from_pretrained", nothing),
    ):
        package = "scripts.generate_tiny_models.for_causal_lm"
        for script in sorted((source / package.replace(".", "/")).glob("*_causal_lm*.py")):
            text = script.read_text()
            made = re.search(r"^model = (\w+)\(config\)", text, re.MULTILINE)
            suffix = re.search(r'^push_to_hub\(.*"tiny"(?:, "(.*)")?\)', text, re.MULTILINE)
            if made and suffix and f'/tiny-{"-".join(filter(None, (made[1], suffix[1])))}"' in wanted:
                for field, value in OF_TOKENIZER.items():
                    text = re.sub(rf"\b{field}=.*,$", f"{field}={value},", text, flags=re.MULTILINE)
                exec(compile(text, script, "exec"), {"__name__": script.stem, "__package__": package})
    keep(folder, "Qwen/Qwen3-4B", tokenizer("Qwen/Qwen3-4B"), transformers.Qwen3Config())


def keep(folder: Path, name: str, *parts: Any) -> None:
    """Save models and tokenizers where the hub's client looks for a downloaded repository."""
    repository = folder / "hub" / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / ("0" * 40)
    for part in parts:
        part.save_pretrained(snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(snapshot.name)


def make_tokenizer(source: Path, name: str) -> Any:
    """A byte-level BPE tokenizer of TRL's data, with the special tokens of the model's chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    template, end = next(
        (found for start, found in TEMPLATES.items() if name.startswith(start)), (None, "<|endoftext|>")
    )
    text = (source / "trl" / "chat_templates" / f"{template}.jinja").read_text() if template else ""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    lines = [text, *(path.read_text() for path in (source / "scripts").glob("generate_*_dataset.py"))]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=3000, initial_alphabet=alphabet))
    special = sorted({"<|endoftext|>", end, *re.findall(r"<\|\w+\|>", text)})
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in special])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, pad_token="<|endoftext|>")
    made.chat_template = text or None
    return made


# The plugin -------------------------------------------------------------------------------------------------------


def load_dataset(name: str, config: str, split: str | None = None, streaming: bool = False) -> Any:
    """Replacement for `datasets.load_dataset` that reads the folder of `make_hub`."""
    import datasets

    found: Any = datasets.load_from_disk(str(Path(os.environ[HUB]) / "datasets" / name / config))
    if split is None:
        return found
    part, count = re.fullmatch(r"(\w+)(?:\[:(\d+)\])?", split).groups()  # type: ignore[union-attr]
    rows = found[part] if count is None else found[part].select(range(int(count)))
    return rows.to_iterable_dataset() if streaming else rows


def pytest_configure(config: pytest.Config) -> None:
    """Replace what the test module imports before it does."""
    import datasets
    import trl

    datasets.load_dataset = load_dataset
    if (mode := os.environ[MODE]) != "stock":
        trl.SFTTrainer = streamed_trainer(loads=mode == "loaded")


def streamed_trainer(loads: bool) -> Any:
    """The streamed `SFTTrainer`. loads: whether to load a model given by name, as TRL does, before passing it on."""
    from trl import SFTTrainer
    from trl.trainer.utils import create_model_from_path

    from megatrain.hf import streamed

    kind = streamed(SFTTrainer)
    if not loads:
        return kind

    class Loading(kind):  # type: ignore[misc, valid-type]
        def __init__(self, model: Any = None, args: Any = None, **given: Any) -> None:
            if isinstance(model, str):
                how = dict(getattr(args, "model_init_kwargs", None) or {})
                how.setdefault("trust_remote_code", getattr(args, "trust_remote_code", False))
                model = create_model_from_path(model, **how)
            super().__init__(model, args, **given)

    return Loading


@pytest.fixture
def lazy_shared_datadir(request: pytest.FixtureRequest) -> Path:
    """The folder `data` beside the tests, as the plugin pytest-datadir gives it."""
    return request.path.parent / "data"


def outcome_of(report: Any, call: Any) -> str | None:
    """`passed`, `skipped`, `refused: ...` by a MegaTrain error, or `failed: ...`; `None` if set-up or
    tear-down succeeded."""
    from megatrain.errors import MegaTrainError

    if report.skipped:
        return "skipped"
    if report.failed:
        error = call.excinfo.value
        kind = "refused" if isinstance(error, MegaTrainError) else "failed"
        return f"{kind}: {type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    return "passed" if report.when == "call" else None


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Any:
    """Record the outcome before TRL's conftest changes the error."""
    found = yield
    if (outcome := outcome_of(found.get_result(), call)) is not None:
        with Path(os.environ[REPORT]).open("a") as file:
            file.write(json.dumps([item.nodeid.split("::", 1)[1], outcome]) + "\n")


if __name__ == "__main__":
    make_hub(Path(sys.argv[1]), Path(sys.argv[2]))
