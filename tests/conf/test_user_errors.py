"""A mistake ends with one sentence that names the key or file and what was expected; earlier results stay."""

import os
from pathlib import Path

import pytest

from spanlab.cli import compose
from spanlab.study.run import run_study

from .conftest import TOY

DOCUMENTED = "no such key; expected one of"
ABOVE_ZERO = "expected a number above zero"
MODULES = " ".join(
    f"batch.speculation.{setting}" for setting in ("method=eagle", "draft_tokens=2", "draft_layers=2", "modules=2")
)

# Overrides after `-cn smoke`, and words of the expected sentence, which begins with the first; … is the last override.
USER_ERRORS = (
    ("workload.bogus=1", f"workload.bogus: {DOCUMENTED} kind, source, path"),
    ("bogus=1", f"bogus: {DOCUMENTED} workload, arrivals"),
    ("arms.none.bogus=1", f"arms.none.bogus: {DOCUMENTED} family, keep"),
    (
        "batch.token_budget=64",
        f"batch.token_budget: {DOCUMENTED}",
        "(did you mean max_num_batched_tokens? token_budget was renamed to max_num_batched_tokens)",
    ),
    ("arms.none.page=16", f"arms.none.page: {DOCUMENTED}", "page was renamed to block_size"),
    (
        "model=llama-3.2-1b arms=pic arms.pic.spans.kernel=QR",
        "…: expected one of rotate_keys",
        "QR was renamed to rotate_queries",
    ),
    ("hydra.bogus=1", f"hydra.bogus: {DOCUMENTED}"),
    ("arms.mine.block_size=3", "arms.mine: no such key"),
    ("workload.kind=qualty", "…: expected one of", "mean quality?"),
    ("workload.source=loca", "…: expected one of", "mean local?"),
    ("workload.source=modelled", "workload.source=modelled", "expected one of shape"),
    ("workload.name=mine", "… with workload.path=null: expected"),
    ("arrivals.kind=poison", "…: expected one of", "mean poisson?"),
    ("timing.kind=rooflin", "…: expected one of", "mean roofline?"),
    ("tracking.kind=wandbb", "…: expected one of wandb, none"),
    ("tracking.mode=on", "…: expected one of auto, online, offline"),
    ("arms.boundary.placement.kind=bolck", "…: expected one of"),
    ("arms.dp_3.placement.also=[tail]", "arms.dp_3.placement.also=tail: expected one of none, sqrt, log"),
    ("arms.none.eviction=mru", "…: expected one of fifo, lru, "),
    (
        "+arms.none.eviction_options.protected=0.5",
        "arms.none.eviction_options.protected: no such option of lru; expected none, for it goes with slru",
    ),
    ("arms.none.eviction=slru +arms.none.eviction_options.protected=1.5", "…: expected a share from 0 to 1"),
    ("arms.none.eviction=random +arms.none.eviction_options.seed=-1", "…: expected zero or more"),
    ("arms.none.eviction=marconi_tuned +arms.none.eviction_options.window=1", "…: expected a number above one"),
    ("arms.none.eviction=priority +arms.none.eviction_options.expired=old", "…: expected one of newest, by_use"),
    ("arms.none.eviction=priority +arms.none.eviction_options.decode=101", "…: expected a number from 1 to 100"),
    ("arms.none.eviction=lease +arms.none.eviction_options.seconds=0", "…: expected a number above zero"),
    (
        "arms.none.eviction=lease +arms.none.eviction_options={order:slru,order_options:{protected:2}}",
        "arms.none.eviction_options.order_options.protected=2: expected a share from 0 to 1",
    ),
    ("arms.none.admission=min_length +arms.none.admission_options.tokens=0", "…: expected a number above zero"),
    ("arms.boundary.recovery=tail_replay +arms.boundary.recovery_options.most_tokens=-1", "…: expected zero or more"),
    (
        "arms.dp_3.placement.kind=block arms.dp_3.placement.count=null arms.dp_3.placement.dp=null "
        "arms.dp_3.placement.interval=-1",
        "…: expected a number above zero",
    ),
    (
        "+arms.dp_3.placement.options.count=2",
        "arms.dp_3.placement.options.count: no such option of dp; expected none, for it goes with ",
    ),
    (
        "model=qwen3-8b arms=attention +strategy@arms.mine=radix arms.mine.policy=chunks "
        "+arms.mine.options.block_size=0",
        "…: expected a number above zero",
    ),
    (
        "arms.none.eviction=lease arms.none.policy=kept_repairs",
        "arms.none.eviction=lease with policy=kept_repairs: expected policy=tree, which pins",
    ),
    (
        "arms.none.eviction=priority +arms.none.eviction_options.ranges=[{priority:0}]",
        "arms.none.eviction_options.ranges[0].priority=0: expected a number from 1 to 100",
    ),
    ("arms.none.admission=never", "…: expected one of"),
    (
        "arms.none.admission=second_touch arms.none.policy=kept_repairs",
        "arms.none.admission=second_touch with policy=kept_repairs: expected admission=always or policy=tree",
    ),
    (
        "arms.none.eviction=belady arms.none.sharing=private",
        "arms.none.eviction=belady with sharing=private: expected sharing=shared",
    ),
    (
        "arms.none.eviction=belady replicas.count=2 replicas.routing=random",
        "arms.none.eviction=belady with replicas.count=2: expected replicas.count=1",
    ),
    ("arms.none.match=prefix", "…: expected one of radix, block_hash"),
    ("count_hit_as=resumable", "…: expected one of reused, matched"),
    ("model=gpt2", "…: not in conf/model; expected one of deepseek-v3"),
    (
        "+strategy@arms.mine=radx",
        "strategy=radx: not in conf/strategy; expected one of radix (did you mean radix?), ape",
    ),
    ("batch.max_num_batched_tokens=many", "batch.max_num_batched_tokens: Value 'many'", "Integer"),
    ("arrivals.rate_rps=fast", "…: expected a number"),
    (
        "arms.boundary.placement.dp.warmup=3",
        "arms.boundary.placement.dp with placement.kind=boundary: expected arms.boundary.placement.dp=null",
    ),
    ("workload.rag.k=3", "… with workload.kind=quality: expected workload.rag.k=6, for it goes with rag"),
    ("arms.dp_3.pool.block_size=32", "arms.dp_3.placement.kind=dp with arms.dp_3.pool: a pool"),
    ("arms.dp_3.pool={block_size:32}", "arms.dp_3.placement", "a pool of blocks has no such"),
    ("arms.dp_3.spans.repair.kind=none", "arms.dp_3.spans with", "spans.maps"),
    ("slo=${oc.env:HOME}", "slo=", "expected its keys, queue_mean_s"),
    ("slo=${oc.env:NOT_SET_ANYWHERE}", "slo: KeyError raised", "'NOT_SET_ANYWHERE' not found"),
    ("arms.dp_3.placement.also=[[1]]", "arms.dp_3.placement.also[0]=[1]: expected text"),
    ("arms.dp_3.keep=-1", "arms.dp_3.keep: Value '-1'", "expected true or false"),
    (f"slo.e2e_p50_s={10**400}", "slo.e2e_p50_s=1", "OverflowError", "expected a value"),
    ("store.entries=9223372036854775808", "store.entries=9223", "of 64 bits"),
    ("store.total_gib=1e300", "store.total_gib=1e+300: expected zero, or a number"),
    ("hardware.compute_efficiency=1e-320", "…: expected zero, or a number from 1e-15 to 1e+18"),
    ("workers=1.5", "workers: Value '1.5'", "Integer"),
    ("batch.enable_chunked_prefill=perhaps", "batch.enable_chunked_prefill: Value 'perhaps'", "bool"),
    ("batch.speculation.draft_tokens=2", "… with arms.none.policy=tree and model.name=qwen3.5-0.8b: expected 0 or"),
    ("model=llama-3.2-1b arms=pic batch.speculation.draft_tokens=2", "… with arms.pic.spans: expected 0"),
    (
        "model=llama-3.2-1b arms=attention load.rates_rps=[] only=[none,radix_1] batch.speculation.draft_tokens=2"
        " batch.speculation.method=eagle batch.speculation.draft_layers=1",
        "batch.speculation.method=eagle with arms.radix_1.policy=tree: expected a pool of blocks, match=block_hash or",
    ),
    (
        "arms=releases " + MODULES,
        "batch.speculation.modules=2 with model.name=qwen3.5-0.8b: expected 1, for vLLM never ends a prompt",
    ),
    (
        "model=llama-3.2-1b arms=attention only=[none,block_hash_16] " + MODULES,
        "batch.speculation.modules=2 with arms.block_hash_16.policy=tree: expected 1, or a pool of blocks",
    ),
    ("batch.speculation.method=eagel", "…: expected one of ngram, eagle", "mean eagle?"),
    ("batch.speculation.acceptance=2", "batch.speculation.acceptance=2.0: expected a share from 0 to 1"),
    ("workers=[1]", "workers: Value"),
    ("arival.rate_rps=3", "arival: no such key", "mean arrivals?"),
    ("arms.dp3.block_size=1", "arms.dp3: no such key; expected one of none", "mean dp_3?"),
    ("hardware=H100", "…: not in conf/hardware", "mean h100?"),
    ("model=qwen", "…: not in conf/model", "mean qwen2.5-0.5b?"),
    ("only=[nope]", "only=nope: expected one of", "boundary"),
    ("output.run=null", "output.run:"),
    ("arrivals.rate_rps=-1", f"arrivals.rate_rps=-1.0: {ABOVE_ZERO}"),
    ("arrivals.rate_rps=nan", "…: expected a finite number"),
    ("arrivals.rate_rps=inf", "…: expected a finite number"),
    ("arrivals.rate_rps=null", "arrivals.kind=poisson needs arrivals.rate_rps: expected"),
    ("arrivals=as_given", "arrivals.rate_rps=8.0 with arrivals.kind=as_given"),
    (
        "arrivals=sessions load.rates_rps=[] load.arms=[] arrivals.think_s=-1",
        "arrivals.think_s=-1.0: expected zero or more",
    ),
    (
        "arrivals=sessions load.rates_rps=[] load.arms=[] arrivals.think_s=1 arrivals.think=normal",
        "…: expected one of exponential, constant",
    ),
    (
        "arrivals=sessions load.rates_rps=[] load.arms=[] arrivals.think=constant",
        "… with arrivals.think_s=null: expected arrivals.think_s too",
    ),
    (
        "arrivals=sessions load.rates_rps=[] load.arms=[]",
        "arrivals.think_s=null: expected a mean think time, for the workload has none",
    ),
    ("replicas.count=0", f"…: {ABOVE_ZERO}"),
    ("replicas.count=2", "… with replicas.routing=null: expected one of", "round_robin"),
    ("replicas.count=2 replicas.routing=round", "…: expected one of", "mean round_robin?"),
    (
        "replicas.count=2 replicas.routing=prefix_events replicas.events_lost=2",
        "replicas.events_lost=2.0: expected a share from 0 to 1",
    ),
    (
        "replicas.count=2 replicas.routing=random backend=engine load.rates_rps=[] load.arms=[]",
        "replicas.count=2 with backend=engine: expected 1, or backend=sim",
    ),
    ("analyses=[replicas]", "analyses=replicas with replicas.count=1: expected two replicas or more"),
    ("arrivals=poisson_per_group arrivals.rate_rps=1 arrivals.order=shuffled", "arrivals.order=shuffled"),
    ("store.total_gib=0", f"store.total_gib=0.0: {ABOVE_ZERO}"),
    ("store.total_gib=16 store.kv_gib=256", "store.kv_gib=256.0: expected at most store.total"),
    ("store.entries=0", f"…: {ABOVE_ZERO}"),
    ("store.total_gib=0.001", "…: expected at least", "GiB"),
    (
        "store.total_gib=16 store.kv_gib=4 store.state_ratio=1",
        "store.kv_gib=4.0 with store.state_ratio=1.0: expected one of them",
    ),
    ("store.total_gib=null store.state_ratio=0.9", "…: expected store.total_gib too"),
    ("store.kv_gib=0.01", "…: expected at least", "tokens of"),
    ("store.state_gib=0.01", "…: expected at least"),
    ("seeds=[]", "…: expected one or more"),
    ("seeds=[0,0]", "seeds=[0, 0]: expected one or more different"),
    ("seeds=[-1]", "…: expected", "from 0"),
    ("workers=0", f"…: {ABOVE_ZERO}"),
    ("executor.kind=slurm", "…: expected one of local, here, dask"),
    ("executor=dask", "executor.address=None with executor.kind=dask: expected the scheduler's tcp://HOST:PORT"),
    ("executor.address=tcp://a:1", "… with executor.kind=local"),
    ("executor=dask executor.address=tcp://a:1", "workers=1 with executor.kind=dask: expected null"),
    ("workload.documents=0", f"…: {ABOVE_ZERO}"),
    ("workload.max_prompt_tokens=10", "workload.max_prompt_tokens=10", "expected"),
    ("warmup_fraction=1", "warmup_fraction=1.0: expected a share"),
    ("arms.boundary.placement.interval=5", "… with placement.kind=boundary: expected", "it goes with block"),
    (
        "arms.block_512.placement.interval=null",
        "arms.block_512.placement.kind=block needs arms.block_512.placement.interval: expected",
    ),
    ("arms.dp_3.placement.kind=balanced", "arms.dp_3.placement.dp with placement.kind=balanced"),
    ("arms.dp_3.placement.dp=null", "arms.dp_3.placement.kind=dp needs arms.dp_3.placement.dp: expected its keys (Dp)"),
    (
        "arms.dp_3.placement.dp.update=frozen arms.dp_3.placement.dp.warmup=null",
        "… with dp.update=frozen: expected the number of requests to learn from",
    ),
    ("arms.dp_3.placement.dp.update=frozen arms.dp_3.placement.dp.every=5", "… with dp.update=frozen: expected null"),
    (
        "arms.dp_3.placement.dp.update=periodic arms.dp_3.placement.dp.decay=0.9",
        "… with dp.update=periodic: expected null",
    ),
    (
        "arms.dp_3.placement.dp.solver=published",
        "arms.dp_3.placement.dp.backtrack=per_length with dp.solver=published: expected fixed",
    ),
    ("arms.block_512.placement.interval=63", "…: expected a multiple of 64"),
    ("arms.block_512.placement.interval=1", "…: expected a multiple of 64"),
    ("arms.boundary.placement.offset=64", "… with placement.kind=boundary: expected", "it goes with tail"),
    ("+strategy@arms.mine=tail arms.mine.placement.count=0", f"…: {ABOVE_ZERO}"),
    ("arms.dp_3.placement.dp.decay=2", "arms.dp_3.placement.dp.decay=2.0: expected a share"),
    ("arms.none.placement.kind=last", "… with keep=false"),
    (
        "arms.boundary.placement.also=[response_end] arms.boundary.sharing=private",
        "arms.boundary.placement.kind=response_end with arms.boundary.sharing=private: expected shared",
    ),
    ("arms.none.cache.states_per_path=3", "… with arms.none.placement.kind=none: expected null"),
    ("arms.boundary.recovery=tail_replai", "…: expected one of", "mean tail_replay?"),
    (
        "+arms.boundary.recovery_options.most_tokens=5",
        "arms.boundary.recovery_options.most_tokens: no such option of recompute; expected none, for it goes with ",
        "resident_kv, tail_replay",
    ),
    (
        "model=qwen3-8b arms=attention arms.radix_1.recovery=tail_replay",
        "… with model.name=qwen3-8b: expected recompute",
    ),
    (
        "arms.boundary.recovery=resident_kv timing=constant timing.seconds_per_computed_token=0.001",
        "arms.boundary.recovery=resident_kv with timing.kind=constant: expected roofline",
    ),
    (
        "arms.boundary.recovery=tail_replay backend=engine",
        "arms.boundary.recovery=tail_replay with backend=engine: expected recompute, or backend=sim",
    ),
    (
        "arms.boundary.state_format=int8 backend=engine",
        "arms.boundary.state_format=int8 with backend=engine: expected native, or backend=sim",
    ),
    (
        "arms.boundary.state_format=bf16 model.state_itemsize=2",
        "arms.boundary.state_format=bf16 with model.state_itemsize=2: expected native",
    ),
    ("arms.boundary.recovery=state_backfill", "… without store.tiers: expected a tier"),
    (
        "arms.boundary.recovery=state_backfill +tier@store.tiers.host=dram store.tiers.host.load=layerwise",
        "… with arms.boundary.recovery=state_backfill: expected blocking",
    ),
    ("arms.none.match=block_hash", "arms.none.block_size=1 with match=block_hash: expected a block"),
    ("arms.none.block_size=0", f"…: {ABOVE_ZERO}"),
    ("arms.boundary.block_size=48", "…: expected a divisor or a multiple"),
    (
        "model=llama-3.1-8b",
        "arms.radix_branch_last.placement.kind=branch with model.name=llama-3.1-8b",
        "expected a hybrid model, or arms=attention",
    ),
    ("model.grid=0", "model.grid", "0", "expected a positive integer"),
    ("~arms", "… is empty: expected at least one strategy"),
    ("only=[nonee]", "only=nonee: expected one of none, kv_only", "mean none?"),
    ("load.rates_rps=[4]", "load.rates_rps=[4.0] without load.arms: expected arms, or load.rates_rps=[]"),
    ("load.rates_rps=[4] load.arms=[nonee]", "load.arms=nonee: expected one of none"),
    ("load.arms=[none,dp_33]", "load.arms=dp_33: expected one of none, ", "mean dp_3?"),
    ("+bars.thrash=[nope]", "bars.thrash=nope: expected one of none, "),
    ("+bars.trash=[none]", "bars=trash: expected one of ", "mean thrash?"),
    ("+families.all=[nope]", "families.all=nope: expected one of none, "),
    ("analyses=[summary,families] +families.all=[none] +families.no=[]", "…: expected one or more of none, "),
    ("engine.seed=-1", "…: expected zero or more"),
    ("load.rates_rps=[-4] load.arms=[none]", f"load.rates_rps=-4.0: {ABOVE_ZERO}"),
    ("output.if_exists=replce", "…: expected one of replace, resume"),
    ("output.if_exists=fail", "output.run=kept:", "exists; expected a new name"),
    ("output.root=/dev/null", "/dev/null/quality", "Not a directory"),
    ("workload.path=x.jsonl", "… has no quality.npz; expected"),
    ("workload.source=local", "workload.kind=quality, source=local needs workload.path: expected"),
    ("workload.vocab_fold=3", "workload.vocab_fold=3", "goes with tokenised"),
    ("workload.queries_path=x", "… with", "goes with system_prompts"),
    ("workload=synthetic workload.synthetic.kind=foo", "workload.", "foo", "expected one of"),
    ("timing=constant timing.seconds_per_step=-1", "timing.seconds_per_step=-1.0: expected zero"),
    ("batch.max_num_batched_tokens=8", "…: expected at least batch.max_num"),
    ("batch=single batch.long_prefill_token_threshold=8", "…: expected 0, for batch.enable_chunked_prefill=false"),
    ("batch.long_prefill_token_threshold_adaptive=true", "…: expected batch.long_prefill_token_threshold beside it"),
    ("workload.popularity.zipf=1", "workload.popularity.zipf is set: expected"),
    ("only=[none", "…: expected KEY=VALUE"),
    ("foo", "…: expected KEY=VALUE"),
    ("+bogus=1", "bogus: no such key"),
    ("++arms.none.bogus=1", "arms.none.bogus: no such key"),
    ("store.total_gib=inf", "…: expected"),
    ("hardware.host_s=inf", "hardware.host_s"),
    ("arrivals=as_given arrivals.rate_rps=null load.rates_rps=[4] load.arms=[none]", "load.rates_rps", "as_given"),
    ("load.rates_rps=[4] load.arms=[none] load.seeds=[]", "…: expected"),
    ("load.rates_rps=[4] load.arms=[none] load.seeds=[-1]", "…: expected"),
    ("load.rates_rps=[4,4] load.arms=[none]", "load.rates_rps=[4.0, 4.0]: expected"),
    ("baseline=nonee", "…: expected one of none"),
    ("output.run=a/b", "…: expected"),
    ("output.run=..", "…: expected"),
    ("seeds=[99999999999999999999]", "seeds"),
    ("workload.tokenizer=x", "workload.tokenizer=x"),
    ("workload=synthetic workload.synthetic.seed=-1", "workload.synthetic.seed"),
    ("model=llama-3.2-1b arms=pic arms.pic.spans.keys=raw", "… with kernel=rotate_queries: expected local"),
    (
        "model=llama-3.2-1b arms=pic arms.cache_blend_15.spans.repair.check_layer=16",
        "…: expected at most layer 15 of llama-3.2-1b",
    ),
    (
        "model=llama-3.2-1b arms=pic +strategy@arms.mine=query_aware arms.mine.spans.repair.layers=[3,16]",
        "arms.mine.spans.repair.layers=[3, 16]: expected at most layer 15 of llama-3.2-1b",
    ),
    (
        "model=qwen3.5-27b hardware=rtx4090 store=gib_64",
        "model.name=qwen3.5-27b: its weights take",
        "GiB of hardware.name=rtx4090",
    ),
    (
        "arms=pic",
        "arms.pic.spans with model.name=qwen3.5-0.8b: its recurrent layers",
        "expected spans.maps, or a model of attention layers alone",
    ),
    (
        "model=llama-3.2-1b arms=attention +strategy@arms.mine=pic_exact arms.mine.placement.kind=none",
        "arms.mine.spans.maps.form=exact with model.name=llama-3.2-1b",
        "expected null, or a hybrid model",
    ),
    (
        "arms=hybrid_pic arms.pic_sum.spans.repair.kind=last arms.pic_sum.spans.repair.k=4",
        "arms.pic_sum.spans.repair.kind=last with arms.pic_sum.spans.maps, which are of what follows a repair",
        "expected none or first",
    ),
    ("arms=hybrid_pic arms.pic_sum.spans.provenance=as_seen", "… with arms.pic_sum.spans.maps", "expected isolated"),
    ("arms=hybrid_pic arms.pic_sum.spans.sharing=private", "… with arms.pic_sum.spans.maps", "expected canonical"),
    (
        "arms=hybrid_pic arms.pic_sum.cache.hold_state=true",
        "arms.pic_sum.cache.hold_state=True with arms.pic_sum.spans.maps",
        "expected False",
    ),
    (
        "arms=hybrid_pic arms.pic_low_rank_4.spans.maps.rank=129",
        "arms.pic_low_rank_4.spans.maps.rank=129",
        "expected at most 128, the key channels of a head",
    ),
    (
        "arms=hybrid_pic arms.pic_exact.block_size=16 arms.pic_exact.spans.maps.interval=40",
        "…: expected a multiple of arms.pic_exact.block_size=16",
    ),
    ("arms=hybrid_pic arms.pic_exact.spans.maps.rank=4", "… with form=exact", "expected null"),
    ("model=llama-3.2-1b arms=pic arms.pic.spans.bogus=1", f"arms.pic.spans.bogus: {DOCUMENTED} provenance, keys"),
    ("model=llama-3.2-1b arms=pic arms.pic.spans.repair.kind=frist", "…: expected one of none, first", "mean first?"),
    (
        "workload=ragpulse workload.ragpulse.speedup=60",
        "workload.ragpulse.speedup=60.0 with arrivals.kind=poisson: expected as_given",
    ),
    (
        "workload=ragpulse workload.ragpulse.rate_rps=2",
        "workload.ragpulse.rate_rps=2.0 with arrivals.kind=poisson: expected as_given",
    ),
    (
        "workload=ragpulse arrivals=as_given",
        "arrivals.rate_rps=8.0 with arrivals.kind=as_given: expected arrivals.rate_rps=null",
    ),
    (
        "analyses=[serving] sweep=['store.total_gib=1,2']",
        "… with analyses=['serving']: expected sweep=[], or summary among them",
    ),
    ("tracking.kind=wandb tracking.mode=online", "…: expected"),
)

# Refused because of files and packages, not settings: --dry and a run give the same sentence.
OF_A_RUN = (
    "hydra.bogus=1",
    "arrivals=sessions load.rates_rps=[] load.arms=[]",
    "output.if_exists=fail",
    "output.root=/dev/null",
    "tracking.kind=wandb tracking.mode=online",
)
SENTENCES = {
    typed: (first.replace("…", typed.split()[-1].lstrip("+~")), *others) for typed, first, *others in USER_ERRORS
}


@pytest.mark.parametrize("typed", [typed for typed in SENTENCES if typed not in OF_A_RUN])
def test_a_mistake_gets_its_sentence(typed: str, spanlab, one_sentence, toy):
    one_sentence(spanlab("-cn", "smoke", "--dry", *toy, *typed.split()), *SENTENCES[typed])


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """The folder of a finished run called kept."""
    root = tmp_path_factory.mktemp("outputs")
    return run_study(compose("smoke", [*TOY, "output.run=kept"]), "smoke", root)


@pytest.mark.parametrize("typed", ["store.total_gib=0.001", *OF_A_RUN])
def test_a_mistake_leaves_a_finished_run_as_it_is(
    typed: str, finished: Path, spanlab, one_sentence, bytes_below, monkeypatch, tmp_path: Path
):
    monkeypatch.setenv("HOME", str(tmp_path))  # without a login
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    before = bytes_below(finished)
    here = (f"output.root={finished.parents[1]}", "output.run=kept")
    said = [spanlab("-cn", "smoke", *dry, *TOY, *here, *typed.split()) for dry in ([], ["--dry"])]
    one_sentence(said[0], *SENTENCES[typed])
    assert said[1].ours == said[0].ours
    assert bytes_below(finished) == before


def test_arms_that_an_entry_writes_out_are_no_group(spanlab, one_sentence):
    had = "arms: entry tiers_sim has no such group, its keys are in the entry; expected arms.KEY=VALUE; "
    one_sentence(spanlab("-cn", "tiers_sim", "arms=pic"), had, "entries with the group arms: batch_sim, ")


def test_an_unknown_entry_lists_the_entries(spanlab, one_sentence):
    one_sentence(
        spanlab("-cn", "qualty_sim"),
        "entry qualty_sim: not in conf/; expected one of quality_sim (did you mean quality_sim?), batch_sim, ",
    )


def _parquet(folder: Path, kind: str) -> Path:
    import pyarrow as pa
    from pyarrow import parquet

    path = folder / f"{kind}.parquet"
    good = {"group_id": [1], "idx": [0], "tokens": [[1, 2, 3]], "n_tokens": [3]}
    if kind == "unreadable":
        path.write_bytes(b"PAR1 but not really")
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "rowless":
        parquet.write_table(pa.table(good).slice(0, 0), path)
    elif kind == "columnless":
        parquet.write_table(pa.table(good).drop(["tokens"]), path)
    elif kind == "wordy":
        parquet.write_table(pa.table(good | {"tokens": [["a", "b", "c"]]}), path)
    elif kind == "miscounted":
        parquet.write_table(pa.table(good | {"n_tokens": [4]}), path)
    return path


FILES = {
    "missing": "is not a file",
    "unreadable": "is not a readable Parquet file",
    "empty": "is not a readable Parquet file",
    "rowless": "holds no rows",
    "columnless": "has no column 'tokens'",
    "wordy": "has column 'tokens' of type list",
    "miscounted": "has n_tokens=4 in row 0",
}


@pytest.mark.parametrize("kind", FILES)
def test_a_bad_file_gets_its_sentence(kind: str, spanlab, one_sentence, tmp_path: Path):
    path = _parquet(tmp_path, kind)
    done = spanlab("-cn", "sparse_prefix_replica", f"workload.path={path}", f"output.root={tmp_path / 'out'}")
    one_sentence(done, f"workload.path={path} {FILES[kind]}", "expected")
    assert not (tmp_path / "out").exists()


def test_a_missing_quality_file_names_the_ways_out(spanlab, one_sentence, tmp_path: Path):
    where = ("workload.source=local", f"workload.path={tmp_path}/none.jsonl", "workload.tokenizer=x")
    done = spanlab("-cn", "quality_sim", *where, f"output.root={tmp_path / 'out'}")
    one_sentence(done, f"workload.path={tmp_path}/none.jsonl", "workload.source=shape", "workload.source=hub")


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (("-cn", "smoke", "workload.bogus=1"), "workload.bogus: no such key"),
        (("-cn", "smoke", "arrivals.rate_rps=-1"), "arrivals.rate_rps=-1.0: expected a number above zero"),
        (("-cn", "nothing"), "entry nothing: not in conf/; expected one of"),
        (("-cn", "sparse_prefix_replica", "workload.path=/none.parquet"), "workload.path=/none.parquet is not a file"),
    ],
)
def test_the_script_prints_only_the_sentence(typed, words, spanlab, one_sentence):
    done = spanlab(*typed)
    one_sentence(done, words)
    assert done.err.splitlines() == done.ours
    assert done.out == ""


def test_a_variable_shows_the_traceback_of_the_installed_script(console):
    """Without it the script prints one sentence: tests/conf/test_full_disk.py."""
    done = console("-cn", "smoke", "arrivals.rate_rps=-1", env=os.environ | {"SPANLAB_TRACEBACK": "1"})
    assert done.code == 1
    assert "Traceback" in done.err
    assert "ValueError: arrivals.rate_rps=-1.0" in done.err


@pytest.mark.parametrize("rate", ["arrivals.rate_rps=1", "arrivals.rate_rps=10000"])
def test_memory_that_the_sentence_asks_for_is_enough(rate: str, spanlab, toy, tmp_path: Path):
    here = (*toy, rate, f"output.root={tmp_path}")
    refused = spanlab("-cn", "smoke", *here, "store.total_gib=0.001")
    asked = float(refused.ours[0].split("expected at least ")[1].split(" GiB")[0])
    done = spanlab("-cn", "smoke", *here, f"store.total_gib={asked * 1.01}")  # the printed number is rounded
    assert done.code == 0, done.err


def test_an_arm_that_needs_marks_is_refused_where_there_are_none(
    spanlab, one_sentence, toy, toy_parquet: Path, tmp_path
):
    study = ("workload=tokenised", f"workload.path={toy_parquet}", "only=[none, boundary]", f"output.root={tmp_path}")
    done = spanlab("-cn", "smoke", *toy, *study)
    one_sentence(done, "arms.boundary.placement.kind=boundary", "tokenised", "expected")


def test_a_run_without_any_time_is_refused(spanlab, one_sentence, toy):
    still = ("timing=constant", "timing.seconds_per_computed_token=0")
    one_sentence(
        spanlab("-cn", "smoke", "--dry", *toy, *still), f"{still[1]} with timing.seconds_per_step", "above zero"
    )
    assert spanlab("-cn", "smoke", "--dry", *toy, *still, "timing.seconds_per_step=0.01").code == 0


def test_a_killed_worker_gives_one_sentence():
    """It once ended a study with nothing after the colon."""
    from concurrent.futures.process import BrokenProcessPool

    from spanlab.errors import sentence

    said = sentence(BrokenProcessPool())
    assert said.startswith("workers: a worker process was killed, most likely for memory; expected")
