"""jobs.plan: what is printed, what is refused, and what is never loaded."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from jobs.config.help import JobSettings
from jobs.config.settings import load
from jobs.planning.config import FORMATS, PlanConfig
from jobs.planning.planning import Planned, make_plan
from jobs.planning.report import format_plan
from runtime.config.profiles import DTypeRates, MeasuredRates
from runtime.config.settings import Attention, DType, MachineConfig, Order
from runtime.errors import BudgetError, ConfigError
from runtime.plan.search.policy import Policy
from runtime.planning.policy_cache import CachedPolicy
from runtime.resources import Resource

ROOT = Path(__file__).resolve().parents[2]


def config_of(*overrides: str) -> PlanConfig:
    with initialize_config_dir(str(ROOT / "conf"), version_base=None):
        return load(PlanConfig, compose("plan", overrides=list(overrides)))


def plan(*overrides: str) -> Planned:
    return make_plan(config_of(*overrides))


def test_a_full_run_loads_neither_torch_nor_transformers() -> None:
    """Searched, of a model that is published in fewer bytes."""
    program = (
        "import sys, runpy\n"
        "sys.argv = ['plan', 'model=gpt-oss-20b', 'machine=t4', 'dataset=mtbench', 'sampling.max_new_tokens=16', "
        "'workload.num_requests=32', 'policy=hrm']\n"
        "try:\n    runpy.run_module('jobs.plan', run_name='__main__')\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
        "print('loaded:', *sorted({'torch', 'transformers', 'numba', 'datasets', 'matplotlib'} & set(sys.modules)))\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert "predicted:" in ended.stdout
    assert ended.stdout.splitlines()[-1].split() == ["loaded:"]


def test_the_report_has_ledgers_policy_prediction_and_the_beginning_of_the_schedule() -> None:
    text = format_plan(plan("model=llama-3.2-1b", "machine=t4", "policy=fixed"), num_actions=5)
    for heading in ("device memory:", "host memory:", "plan:", "predicted:", "schedule:"):
        assert f"\n{heading}\n" in text
    schedule = text.partition("schedule:\n")[2]
    assert sum(1 for line in schedule.splitlines() if not line.startswith("#")) == 5


def test_a_searched_policy_is_reported_with_its_reasons() -> None:
    text = format_plan(
        plan("model=llama-3.2-1b", "machine=t4", "policy=hrm", "workload.num_requests=64"), num_actions=0
    )
    chosen = text.partition("\nchosen:\n")[2].partition("\n\n")[0]
    assert "policy " in chosen
    assert " is the limit; by the roofline" in chosen
    assert "turning points" in chosen


def test_the_page_names_the_formats_that_a_model_is_published_in_with_their_bytes_and_what_is_in_them() -> None:
    settings = ("model=gpt-oss-120b", "machine=h100", "policy=fixed", "workload.num_requests=8")
    text = format_plan(plan(*settings), num_actions=0)
    head, mxfp4, bf16, empty, *_ = text.splitlines()
    assert head.startswith("gpt-oss-120b (60.8 GiB as stored) on h100")
    assert mxfp4.split(maxsplit=3) == ["mxfp4", "56.7", "GiB", "mlp (experts.gate_up_proj, experts.down_proj)"]
    assert bf16.split()[:3] == ["BF16", "4.04", "GiB"]
    assert "embed_tokens, vectors, self_attn (q_proj, k_proj, v_proj, o_proj), mlp (router, " in bf16
    assert empty == ""
    assert "precision weights mxfp4, BF16: exact, as published" in text
    plain = format_plan(plan(*settings, "plan.format=bfloat16", "offload=cpu"), num_actions=0)
    assert plain.startswith("gpt-oss-120b (218 GiB as stored) on h100")
    assert "mxfp4" not in plain


def test_a_model_is_planned_as_others_publish_it() -> None:
    text = format_plan(plan("model=llama-3.3-70b", "machine=h100", "policy=fixed", "plan.format=gptq"), num_actions=0)
    assert text.startswith("llama-3.3-70b (37 GiB as stored) on h100")
    assert "precision weights gptq-int4, BF16: exact, as published" in text


def test_a_format_that_cannot_be_read_is_refused_with_those_that_can() -> None:
    refused = r"plan\.format must be one of lossless, int8, .* gptq, .* Q4_K, .* or null, got 'gtpq': did you mean gptq"
    with pytest.raises(ConfigError, match=refused):
        config_of("model=gpt2", "plan.format=gtpq")
    with pytest.raises(ConfigError, match="got 'q4_k_m': did you mean Q4_K"):
        config_of("model=gpt2", "plan.format=q4_k_m")
    assert sorted([*FORMATS, "null"]) == sorted(JobSettings("plan", []).choices("plan.format"))


def test_a_model_that_is_published_in_fewer_bytes_is_not_rounded_while_it_is_read() -> None:
    with pytest.raises(ConfigError, match=r"model\.quantize=int8: model=gpt-oss-20b .* \(mxfp4, BF16\): leave"):
        plan("model=gpt-oss-20b", "machine=h100", "model.quantize=int8")
    small = ("model=gpt-oss-20b", "machine=h100", "policy=fixed", "plan.format=bfloat16")
    assert plan(*small, "model.quantize=int8").shape.weight_bytes < plan(*small).shape.weight_bytes


def test_no_action_asked_for_is_no_schedule() -> None:
    assert "schedule:" not in format_plan(plan("model=llama-3.2-1b", "policy=fixed"), num_actions=0)


def test_prompts_are_as_many_and_as_long_as_the_data_set_says() -> None:
    planned = plan("model=llama-3.2-1b", "dataset=helm_summarization", "workload.num_requests=100")
    assert len(planned.sizes) == 100
    assert planned.num_prompt_tokens / 100 == pytest.approx(1693, rel=0.01)
    assert max(size.num_prompt_tokens for size in planned.sizes) <= 1984


def test_budgets_of_the_config_come_before_those_of_the_machine() -> None:
    small = plan("model=llama-3.2-1b", "offload.device_memory_gib=2", "offload.host_memory_gib=9", "policy=fixed").run
    assert [ledger.budget_bytes >> 30 for ledger in small.placement.ledgers] == [2, 9]


def test_a_model_that_does_not_fit_is_refused_with_the_equation() -> None:
    with pytest.raises(BudgetError, match="host memory:"):
        plan("model=llama-3.1-405b", "machine=t4", "offload=cpu", "policy=fixed")


def test_prompts_of_which_nothing_is_known_are_asked_for() -> None:
    with pytest.raises(
        ConfigError,
        match=r"dataset=jsonl: set dataset\.path to count them, or workload\.num_requests",
    ):
        config_of("dataset=jsonl")
    keys = ("num_requests=8", "mean_prompt_tokens=20", "max_prompt_tokens=30")
    assert len(plan("dataset=jsonl", "model=gpt2", *(f"workload.{key}" for key in keys)).sizes) == 8


def test_where_nothing_is_generated_there_is_nothing_to_plan() -> None:
    with pytest.raises(ConfigError, match=r"sampling.max_new_tokens must be 1 or more"):
        config_of("model=gpt2", "sampling.max_new_tokens=0")


def test_prompts_longer_than_the_model_knows_are_refused() -> None:
    with pytest.raises(ConfigError, match="above model=gpt2's context of 1,024"):
        plan("model=gpt2", "dataset=helm_summarization")


def test_a_machine_without_rates_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"python -m jobs\.measure"):
        plan("model=gpt2", "machine=cpu")


def test_the_compute_dtype_is_the_one_that_the_machine_has_units_for() -> None:
    gpt2 = ("model=gpt2", "policy=fixed")
    assert plan(*gpt2, "machine=t4").dtype is DType.float16
    assert plan(*gpt2, "machine=l4").dtype is DType.bfloat16
    assert plan(*gpt2, "machine=l4", "model.dtype=float32").shape.compute_dtype_bytes == 4


def test_more_samples_of_a_prompt_are_more_requests() -> None:
    once, thrice = (
        plan("model=gpt2", "sampling=sample", f"sampling.n={n}", "workload.num_requests=10") for n in (1, 3)
    )
    assert (len(once.sizes), len(thrice.sizes)) == (10, 30)


def test_each_resource_that_works_says_how_busy_it_is_and_one_binds_each_phase() -> None:
    text = format_plan(plan("model=mixtral", "machine=t4", "policy=fixed"), num_actions=0)
    busy = text.partition("\nbusy:")[2].partition("\n\n")[0]
    head, *lines = busy.splitlines()
    assert head.split() == ["prefill", "decode"]
    assert {line[:18].strip() for line in lines} == {"host-to-device", "compute", "host memory"}
    assert busy.count("the limit") == 2


def test_link_and_attention_on_the_cpu_share_the_memory_channels_of_the_host() -> None:
    """On two channels of DDR4-3200 neither link nor attention takes longer by itself than on DDR5-5600, but both
    together take more than there is."""
    settings = (
        *("machine=rtx4090", "machine.sheet.host_num_cores=8", "model=llama-3.1-8b", "workload.num_requests=1024"),
        *("offload=cpu", "offload.resident_layers=0", "policy=fixed", "policy.attention=cpu"),
        *("policy.schedule=cgopipe", "policy.micro_batch_size=256", "policy.num_micro_batches=4"),
    )
    fast, slow = (plan(*settings, f"machine.sheet.host_memory_gb_per_second={rate}") for rate in (89.6, 51.2))
    before, after = (each.prediction.decode for each in (fast, slow))
    host = Resource.host_memory
    assert {**after.busy_seconds, host: 0.0} == pytest.approx({**before.busy_seconds, host: 0.0})
    assert after.busy_seconds[host] == pytest.approx(89.6 / 51.2 * before.busy_seconds[host])
    assert before.binding is not host
    assert after.binding is host
    assert after.seconds > 1.2 * before.seconds
    assert "host memory" in format_plan(slow, num_actions=0).partition("\nbusy:")[2]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["plan.sweep_points=[1,2]"], "plan.sweep_points needs plan.sweep="),
        (["plan.sweep=batch", "plan.sweep_points=[8,4]"], r"above 0 and ascending, got \[8.0, 4.0\]"),
        (["plan.sweep=memory", "plan.sweep_points=[0,4]"], r"above 0 and ascending, got \[0.0, 4.0\]"),
        (["plan.sweep=batch", "plan.sweep_points=[1.5]"], "1 or more sequences with plan.sweep=batch"),
        (["plan.sweep=prompt", "plan.sweep_points=[0.5]"], "tokens with plan.sweep=prompt"),
        (["plan.sweep=speed"], "plan.sweep"),
        (["plan.directory=' '"], "plan.directory is empty"),
    ],
)
def test_what_is_drawn_is_refused_where_it_makes_no_sense(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of("model=gpt2", *settings)


def kept(directory: Path, policy: Policy) -> None:
    """As a run's search leaves it behind."""
    (directory / "policies").mkdir()
    (directory / "policies" / "one.json").write_text(CachedPolicy(policy=policy, why=("because",)).to_json())


def test_a_pin_is_followed_as_a_run_follows_it(tmp_path: Path) -> None:
    policy = Policy(
        micro_batch_size=3,
        num_micro_batches=2,
        attention=Attention.cpu,
        schedule=Order.cgopipe,
        resident_layers=0,
        kv_fraction=0.0,
    )
    kept(tmp_path, policy)
    searched = ("model=llama-3.2-1b", "machine=t4", "policy=hrm", "workload.num_requests=12")
    found = plan(*searched, f"policy.pin='{policy.digest[:6]}'", f"offload.cache_dir={tmp_path}").run
    assert found.searched_policy == policy
    assert (found.policy.schedule, found.policy.attention, found.num_lanes, found.lane_size) == (
        Order.cgopipe,
        Attention.cpu,
        2,
        3,
    )
    assert plan(*searched).run.searched_policy != policy


def test_a_pin_that_names_nothing_is_refused_with_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"policy\.pin=deadbeef matches none of 0 cached policies"):
        plan("model=gpt2", "machine=t4", "policy=hrm", "policy.pin=deadbeef", f"offload.cache_dir={tmp_path}")


def test_a_machine_whose_products_lack_rates_is_named_with_what_the_plan_makes_of_it() -> None:
    """As `jobs.measure` wrote it where one product had been too slow."""
    one = DTypeRates(
        gemm_gflops=[1.66],
        attention_gb_per_second=8.0,
        cpu_attention_gb_per_second=8.0,
        prefill_attention_gflops=50.0,
    )
    rates = MeasuredRates(
        host_memory_gib=64.0,
        disk_gb_per_second=0.9,
        memory_gb_per_second=10.0,
        turn_seconds=4e-4,
        pass_seconds=0.0,
        gemm_rows=[1, 8, 64],
        float32=one,
        bfloat16=replace(one, gemm_gflops=[1.0, 8.0, 60.0]),
    )
    config = replace(config_of("model=gpt2", "policy=fixed"), machine=MachineConfig(name="mine", rates=rates))
    text = format_plan(make_plan(config), num_actions=0)
    assert "note: machine.rates.float32.gemm_gflops has 1 of 3 rates, up to M=1: plans assume 1.66 GFLOP/s" in text
    whole = replace(config, model=replace(config.model, dtype=DType.bfloat16))
    assert "machine.rates" not in format_plan(make_plan(whole), num_actions=0)
