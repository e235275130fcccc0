"""Each key of a plan does something, or is refused where it would do nothing."""

from __future__ import annotations

import pytest
from pydantic import BaseModel

from thinwire.aggregation import codecs
from thinwire.core import RunPlan
from thinwire.core.plan_schema import Sections

OFF = '[run]\nevaluate = "off"\n'
ALWAYS, ONE_VALUE = "it has an effect in every run", "core/plan_schema.py refuses all but the default"
UNUSED: dict[str, str] = {
    "run.task": ALWAYS, "run.algorithm": ALWAYS, "run.rounds": ALWAYS, "run.seed": ALWAYS, "run.init": ALWAYS,
    "run.priority": (
        "[run]\npriority = 2\n[privacy]\nmode = 'central'\nclip = 1\nnoise_multiplier = 1\nsampling_rate = 0.1"
    ),
    "run.alpha": "[run]\nalpha = 0.2",
    "run.keep": '[run]\nkeep = "last"',
    "run.target": '[run]\nevaluate = "off"\ntarget = { value = 0.9 }',
    "run.patience": f"{OFF}patience = 3",
    "run.metric": f'{OFF}metric = "accuracy"',
    "run.evaluate": ALWAYS, "run.evaluate_every": f"{OFF}evaluate_every = 2",
    "run.evaluate_wait_s": "[run]\nevaluate_wait_s = 5",
    "run.fraction_evaluate": f"{OFF}fraction_evaluate = 0.5",
    "run.eval_cohort": ONE_VALUE, "run.task_match": ALWAYS,
    "cohort.clients": '[cohort]\nmode = "buffered"\nclients = 3',
    "cohort.wait_for": ALWAYS, "cohort.wait_s": ALWAYS, "cohort.min_updates": ALWAYS,
    "cohort.over_select": "[cohort]\nover_select = 0.5",
    "cohort.deadline_s": ALWAYS,
    "cohort.late": '[cohort]\nmode = "buffered"\nlate = "drop"',
    "cohort.staleness_exponent": '[cohort]\nlate = "drop"\nstaleness_exponent = 0',
    "cohort.max_staleness": ALWAYS,  # also of late = "drop": for how many rounds a silent device is not selected again
    "cohort.retry_limit": ALWAYS, "cohort.mode": ALWAYS,
    "cohort.buffer": "[cohort]\nbuffer = 3",
    "cohort.max_concurrency": ALWAYS,
    "cohort.selection": '[cohort]\nselection = "speed"',
    "cohort.max_weight": ALWAYS, "cohort.requires": ALWAYS,
    "local.lr": ALWAYS, "local.steps": "[local]\nsteps = 2\nepochs = 1",
    "local.epochs": "[local]\nsteps = 2\nepochs = 1",
    "local.min_steps": "[local]\nmin_steps = 4",
    "local.codec_threads": ALWAYS, "local.batch": ALWAYS, "local.accumulate": ALWAYS, "local.optimizer": ALWAYS,
    "local.momentum": '[local]\noptimizer = "adam"\nmomentum = 0.9',
    "local.weight_decay": ALWAYS, "local.schedule": ALWAYS, "local.lr_warmup": ALWAYS,
    "local.lr_end": "[local]\nlr_end = 0.1",
    "local.schedule_rounds": "[local]\nschedule_rounds = 5",
    "local.clip_grad": ALWAYS, "local.prox": "[local]\nsteps = 1\nprox = 0.1",
    "local.buffers": ALWAYS, "local.partial": ALWAYS,
    "local.personal_layers": ALWAYS,
    "local.overlap": ALWAYS, "local.durability": ALWAYS,
    "uplink.codec": "[uplink]\ncodec = 'int8'\nladder = ['fp16', 'topk(0.01) > int8']",
    "uplink.layers": ALWAYS, "uplink.feedback": ALWAYS,
    "uplink.feedback_decay": "[uplink]\ncodec = 'identity'\nfeedback_decay = 0.9",
    "uplink.momentum": "[uplink]\nmomentum = 0.9\nfeedback = 'none'\n[local]\nsteps = 1",
    "uplink.warmup": "[uplink]\ncodec = 'int8'\nwarmup = { rounds = 2, ratios = [0.5] }",
    "uplink.ladder": ALWAYS,
    "downlink.codec": ALWAYS, "downlink.feedback": ONE_VALUE,
    "downlink.full_every": "[downlink]\nfull_every = 5",
    "downlink.log_rounds": "[downlink]\nlog_rounds = 5",
    "server.threads": ALWAYS, "server.optimizer": ALWAYS, "server.lr": ALWAYS,
    "server.momentum": "[server]\nmomentum = 0.5",
    "server.beta2": '[server]\noptimizer = "fedavgm"\nbeta2 = 0.5',
    "server.tau": '[server]\noptimizer = "fedavgm"\ntau = 0.1',
    "server.schedule": ALWAYS, "server.lr_warmup": ALWAYS, "server.lr_end": "[server]\nlr_end = 0.1",
    "server.schedule_rounds": "[server]\nschedule_rounds = 5",
    "server.reduce": ALWAYS, "server.max_norm": ALWAYS,
    "secure.enabled": ALWAYS, "secure.adversary": '[secure]\nadversary = "malicious"',
    "secure.max_corrupt": "[secure]\nmax_corrupt = 0.2", "secure.max_dropout": "[secure]\nmax_dropout = 0.2",
    "secure.min_survivors": "[secure]\nmin_survivors = 5", "secure.graph": '[secure]\ngraph = "complete"',
    "secure.bits": "[secure]\nbits = 4", "secure.support": "[secure]\nsupport = 0.5",
    "secure.rotate": "[secure]\nrotate = 1024", "secure.clip": "[secure]\nclip = 1.0",
    "secure.weight_max": "[secure]\nweight_max = 100", "secure.metrics": "[secure]\nmetrics = { loss = 10.0 }",
    "secure.histograms": '[secure]\nhistograms = ["sick"]',
    "secure.post_quantum": "[secure]\npost_quantum = true",
    "privacy.mode": ALWAYS, "privacy.adaptive": "[privacy]\nadaptive = true",
    "privacy.clipping": '[privacy]\nclipping = "per-layer"',
    "privacy.clip": "[privacy]\nclip = 1.0", "privacy.noise_multiplier": "[privacy]\nnoise_multiplier = 1.0",
    "privacy.target_epsilon": "[privacy]\ntarget_epsilon = 8.0", "privacy.delta": "[privacy]\ndelta = 1e-6",
    "privacy.records": "[privacy]\nrecords = 1000",
    "privacy.budget": "[privacy]\nbudget = 8.0", "privacy.max_participations": "[privacy]\nmax_participations = 3",
    "privacy.restart_every": "[privacy]\nrestart_every = 5", "privacy.min_separation": "[privacy]\nmin_separation = 2",
    "privacy.mechanism": '[privacy]\nmechanism = "skellam"', "privacy.population": '[privacy]\npopulation = "ward"',
    "privacy.sampling_rate": "[privacy]\nsampling_rate = 0.1",
}  # fmt: skip
"""What each key needs: a plan in which it would do nothing."""

PLANS = {key: plan for key, plan in UNUSED.items() if plan.startswith("[")}


def refusals(more: str) -> list[str]:
    """What is refused of a plan; tables that the two keys without a default need are filled in."""
    text = more
    for table, needed in (("run", 'task = "digits"'), ("local", "lr = 0.5")):
        text = text if f"[{table}]" in text else f"{text}\n[{table}]\n"
        text = text.replace(f"[{table}]\n", f"[{table}]\n{needed}\n")
    return [refusal.what for refusal in RunPlan.parse(text).check(codecs)]


def test_it_is_known_of_every_key_where_it_would_do_nothing() -> None:
    keys = set[str]()
    for name, field in Sections.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys |= {f"{name}.{key}" for key in field.annotation.model_fields}
    assert keys == UNUSED.keys()


@pytest.mark.parametrize("key", PLANS)
def test_a_key_that_would_do_nothing_is_refused(key: str) -> None:
    word = key.partition(".")[2]
    assert any(word in what.replace("warm-up", "warmup") for what in refusals(PLANS[key])), refusals(PLANS[key])


@pytest.mark.parametrize(
    "more",
    [
        '[cohort]\nlate = "drop"\nstaleness_exponent = 0.5\nmax_staleness = 9',
        f'{OFF}metric = "loss"\nevaluate_every = 1',
        "[downlink]\nfull_every = 0\nlog_rounds = 20",
        "[downlink]\ncodec = 'int8'\nfull_every = 5\nlog_rounds = 5",
        "[cohort]\nclients = 4\nover_select = 0.5",
        "[uplink]\ncodec = 'identity'\nfeedback_decay = 0.9\nlayers = { a = 'sign' }",
        '[run]\nkeep = "best,last"',
        '[run]\nkeep = "all"',
    ],
)
def test_a_key_that_does_something_or_says_its_default_is_not(more: str) -> None:
    assert refusals(more) == []
