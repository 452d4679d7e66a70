"""The options of computing from the command line to each rank, into sidecars, and out of checkpoints again."""

import logging
from pathlib import Path
from typing import Any, get_args

import click
import pytest
import torch
from click.testing import CliRunner
from pydantic import ValidationError

from svdq.pipeline.errors import InputError
from svdq.pipeline.loop.sample import Sample
from svdq.pipeline.models.compute.options import Approximate, Compiled, ComputeOptions, Dtype, Offload
from svdq.pipeline.models.names.model_names import resolve
from svdq.pipeline.models.svd.family import SvdParameters
from svdq.producer.results.finished_videos import read_provenance
from svdq.producer.settings_loader import load_settings
from svdq.producer.storage.storage import Storage
from svdq.worker.checkpoint.checkpoints import Checkpoints
from svdq.worker.checkpoint.store import CheckpointStore, Codec
from svdq.worker.config import (
    RankConfig,
    RunConfig,
    check_ranks,
    private_environment,
    rank_options,
    read_config,
    write_config,
)
from svdq.worker.memory_plan import RankInfo
from svdq.worker.startup import check_alike, prepare_compiling


def test_the_options_of_a_rank_are_those_of_the_pipeline() -> None:
    found = []

    @click.command()
    @rank_options
    def rank(**options: object) -> None:
        found.append(RankConfig(**options))

    assert CliRunner().invoke(rank, [], catch_exceptions=False).exit_code == 0
    assert found.pop() == RankConfig()
    for option, names in (
        ("dtype", Dtype),
        ("compile", Compiled),
        ("approximate", Approximate),
        ("offload", Offload),
    ):
        for name in get_args(names):
            assert CliRunner().invoke(rank, [f"--{option}", name], catch_exceptions=False).exit_code == 0
            compute = found.pop().compute
            assert name in (compute.dtype, compute.compiled, *compute.approximate, compute.offload)
        assert CliRunner().invoke(rank, [f"--{option}", "no-such"]).exit_code == 2


def test_a_rank_reads_the_configuration_that_the_launcher_wrote(
    tmp_path: Path, home: Path, tiny_wan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = RankConfig(device="cpu", burst=True, warmup=("64x64x2",), dtype="bf16", approximate=("int8",), group="1")
    folder = tmp_path / "run"
    folder.mkdir()
    run_config = RunConfig(
        rank=rank, settings=load_settings(stall_s=7, memory_limit="2GB"), model=resolve(str(tiny_wan))
    )
    write_config(folder, run_config)
    # Whatever is changed meanwhile.
    monkeypatch.setenv("SVDQ_STALL_S", "8")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "svdq.toml").write_text("nonsense")
    assert read_config(folder) == run_config
    [path] = folder.iterdir()
    path.write_text(path.read_text().replace('"burst"', '"blast"'))
    with pytest.raises(ValidationError, match="blast"):
        read_config(folder)


def test_ranks_are_told_no_secrets_that_they_do_not_need(tmp_path: Path, home: Path) -> None:
    settings = load_settings(serve_token="s3cret-s3cret-s3cret", notify="json://s3cret")
    write_config(tmp_path, RunConfig(rank=RankConfig(), settings=settings, model=resolve("preview")))
    assert "s3cret" not in (tmp_path / "config.json").read_text()


def test_passwords_reach_ranks_by_their_environment_alone(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = load_settings(redis_url="redis://:s3cret@127.0.0.1:1/0", storage="memory://user:s3cret@host/videos")
    run_config = RunConfig(rank=RankConfig(), settings=settings, model=resolve("preview"))
    write_config(tmp_path, run_config)
    assert "s3cret" not in (tmp_path / "config.json").read_text()
    for name, text in private_environment(settings).items():
        monkeypatch.setenv(name, text)
    assert read_config(tmp_path) == run_config


def test_hosts_that_were_told_different_things_are_one_sentence() -> None:
    alike = [RankInfo(capacity=free, weights=0, device="cpu", compute={"dtype": "float16"}) for free in (5, 6)]
    check_alike([])
    check_alike(alike)
    with pytest.raises(InputError, match=r'rank 0: {"dtype": "float16"}, rank 2: {"dtype": "bfloat16"}.* --dtype'):
        check_alike([*alike, alike[0].model_copy(update={"compute": {"dtype": "bfloat16"}})])


PARAMETERS = SvdParameters(seed=3, steps=9, frames=2, width=64, height=64)
SAMPLE = Sample(
    job_id="job", parameters=PARAMETERS, boundaries=(0, 5, 11), step=4, tensors={"latents": torch.ones(1, 2, 4, 8, 8)}
)


def codec(options: ComputeOptions) -> Codec:
    return Codec(model="m", device=torch.device("cpu"), compute=options.changed() | {"dtype": "float32"})


@pytest.mark.parametrize(
    ("model", "options", "ranks", "words"),
    [
        ("wan", {"offload": "blocks", "compile": "blocks"}, 1, "does not work with --compile"),
        ("wan", {"weights": "native", "compile": "blocks"}, 1, "--weights native does not work with --compile"),
        ("svd", {"offload": "blocks"}, 1, "is for Wan and LTX-2"),
        ("wan", {"offload": "blocks"}, 1, "needs a GPU"),
        ("wan", {"experts": "rounds"}, 2, "--experts rounds --groups 2 --ranks 1"),
    ],
)
def test_options_that_exclude_each_other_are_one_sentence(
    tiny_wan: Path, tiny_model: Path, model: str, options: dict[str, Any], ranks: int, words: str
) -> None:
    resolved = resolve(str(tiny_wan if model == "wan" else tiny_model))
    with pytest.raises(InputError, match=words):
        check_ranks(RankConfig(**options), resolved, ranks, on_gpus="needs a GPU" not in words)
    check_ranks(RankConfig(**options | {"offload": "off", "weights": "auto"}), resolved, 1, on_gpus=False)


def test_a_half_done_video_is_continued_with_the_same_options_only(tmp_path: Path, caplog) -> None:
    before = codec(ComputeOptions(compiled="blocks", approximate=("int8",)))
    store = CheckpointStore(Storage(str(tmp_path)))
    store.open("job")
    store.write("job", 4, before.encode(SAMPLE))
    found = Checkpoints(store, before).furthest("job", PARAMETERS)
    assert found is not None
    assert found.step == 4

    for other in (ComputeOptions(), ComputeOptions(compiled="whole", approximate=("int8",))):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert Checkpoints(store, codec(other)).furthest("job", PARAMETERS) is None
        assert "compiled blocks, approximate ['int8'], native ['int8'], dtype float32" in caplog.text


def test_compiled_code_is_kept_in_a_private_folder_of_the_home(tmp_path: Path, monkeypatch) -> None:
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS"):
        monkeypatch.setenv(name, "to be put back")
        monkeypatch.delenv(name)
    prepare_compiling(tmp_path, 7)
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    assert cache_dir() == str(tmp_path / "compiled")
    assert (tmp_path / "compiled").stat().st_mode & 0o777 == 0o700


@pytest.mark.long
def test_ranks_that_cannot_compute_so_end_the_group_with_one_sentence(site) -> None:
    group = site.start(2, "--compile", "blocks", wait=False, CXX="/no/compiler")
    assert group.end() == 2
    [_, sentence] = group.text.splitlines()
    assert sentence.startswith("Error: --compile blocks does not work on this processor (")
    assert sentence.endswith("torch.compile needs a C++ compiler, and Triton on a GPU. Use --compile off.")


@pytest.mark.long
def test_a_video_says_how_it_was_computed(site) -> None:
    from svdq.pipeline.models.svd.tiny import write_tiny_model

    model = site.folder / "tiny"
    write_tiny_model(model)
    job_id = site.submit(formats=("mp4",))
    options = ["--dtype", "bf16", "--approximate", "int8"]
    group = site.start(1, "--burst", *options, model=str(model), wait=False)
    assert group.end() == 0, group.text
    view = site.view(job_id)
    notice = "tiny (untrained: shows noise), approximate (int8)"
    assert (view.status, view.notice) == ("finished", notice)
    compute = {"dtype": "bfloat16", "approximate": ["int8"], "native": ["int8"]}
    for file in (Path(view.outputs[0]), Path(view.outputs[0]).with_suffix(".json")):
        found = read_provenance(file).as_json()["model"]
        assert len(found["compute"].pop("weights")) == 16
        assert found == {"name": str(model), "notice": notice, "compute": compute}
    shown = site.run("svdq", "inspect", view.outputs[0]).stdout
    assert "bfloat16" in shown
    assert notice in shown
    assert notice in group.text
