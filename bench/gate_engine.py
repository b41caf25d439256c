"""One engine of the identity gate: `python bench/gate_engine.py JOB.json` prints a JSON line for each batch it ran."""

from __future__ import annotations

import dataclasses
import json
import pickle
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

if TYPE_CHECKING:
    from ziggurat.integration.determinism.compare import Outcome

MARK = "ziggurat-gate "
MODEL = ROOT / "bench" / "models" / "demo-moe-fp8"
LAYERS, EXPERTS = 6, 32
ROWS = LAYERS * EXPERTS
REPEATS = 6
OUTCOMES = ("clean", "inline", "streamed", "replayed", "exact", "tolerated", "failed")


@dataclass(frozen=True, slots=True)
class Case:
    """One pool. slots: used ones. shuffle: seed of their order. repeat: how often each workload runs.

    control: replay is switched off, and results must differ.
    """

    name: str
    slots: int
    shuffle: int | None = None
    repeat: int = 1
    control: bool = False
    only: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Part:
    """One engine start. engine: arguments of vLLM's LLM. graphs: steps of decode replay graphs.

    answers: file that the answers of the all-resident pool are written to, or read from if the pool is not all of it.
    inline: layers fetch their own rows, and answers are those of another part. whole: the arena has every row, so
    that no step runs twice.
    """

    config: dict[str, Any]
    debug: dict[str, Any]
    engine: dict[str, Any]
    cases: tuple[Case, ...]
    batches: tuple[int, ...]
    tokens: int
    answers: str
    graphs: bool
    resize: bool = True
    inline: bool = False
    whole: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Part:
        cases = tuple(Case(**{**case, "only": tuple(case["only"])}) for case in raw["cases"])
        return cls(**{**raw, "cases": cases, "batches": tuple(raw["batches"])})


def jobs(work: Path, *, cpu: bool) -> dict[str, Part]:
    """The engines of the gate. Packs and answers lie in `work`."""
    cases = [
        Case("100 %", ROWS),
        Case("50 %", ROWS // 2),
        Case("25 %", ROWS // 4),
        Case("19 %", ROWS * 19 // 100),
        Case("20 slots, below one layer", 20),
        Case("5 slots", 5),
        Case("25 %, slots shuffled (1)", ROWS // 4, shuffle=1),
        Case("25 %, slots shuffled (2)", ROWS // 4, shuffle=2),
        Case("100 %, slots shuffled", ROWS, shuffle=3),
        Case(f"25 %, {REPEATS} times", ROWS // 4, repeat=REPEATS, only=("decode 32",)),
        Case("25 %, replay off (must differ)", ROWS // 4, control=True, only=("decode 32",)),
    ]
    batches: tuple[int, ...] = (1, 2, 3, 4, 8, 16, 17, 32)
    tokens = 12
    engine: dict[str, Any] = {
        "max_model_len": 1024,
        "max_num_batched_tokens": 512,
        "max_num_seqs": 32,
        "seed": 0,
        "enable_prefix_caching": False,
        "enforce_eager": False,
        "gpu_memory_utilization": 0.05,
        "kv_cache_memory_bytes": 2 << 30,
    }
    debug: dict[str, Any] = {}
    if cpu:
        cases = [cases[0], cases[2], cases[4], dataclasses.replace(cases[10], only=("decode 4",))]
        batches, tokens = (1, 4), 4
        engine = {**engine, "max_num_batched_tokens": 256, "max_num_seqs": 8, "enforce_eager": True}
        del engine["kv_cache_memory_bytes"], engine["gpu_memory_utilization"]
        debug = {"kernels": True}

    def part(
        mode: str,
        *,
        pool: str = "100%",
        some: list[Case] = cases,
        resize: bool = True,
        inline: str | None = None,
        lookahead: int = 0,
        some_batches: tuple[int, ...] = batches,
    ) -> Part:
        graphs = {} if cpu or mode == "eager" else {"compilation_config": {"cudagraph_mode": mode}}
        return Part(
            config={
                "tiers": {
                    "disk": {"path": str(work / "packs"), "readers": 4},
                    "host": {"size": inline or "40 rows"},
                    "device": {"size": pool, "device": "cpu" if cpu else "auto"},
                },
                "codecs": {"base": "bf16"},
                "miss": {
                    "mode": "inline" if inline else "replay",
                    "max_replays": 2,
                    "lookahead": 0 if cpu else lookahead,  # a CPU fetches nothing ahead
                },
                "heat": {"path": None},
            },
            debug=debug,
            engine={**engine, **graphs, **({"enforce_eager": True} if mode == "eager" else {})},
            cases=tuple(some),
            batches=some_batches,
            tokens=tokens,
            answers=str(work / f"answers-{mode}"),
            graphs=cpu or mode != "eager",
            resize=resize,
            inline=inline is not None,
            whole=inline == "100%",
        )

    small = [Case("25 % allocated", ROWS // 4)]
    ahead = [Case("25 % allocated, looking ahead", ROWS // 4)]
    without_control = [case for case in cases if not case.control]
    # A pool that every row fits has no staging memory to speak of beside it, since nothing ever passes it by: told to
    # use a part of its slots, it would read each row that is on disk by itself.
    most = ROWS - 1
    by_pool = [case for case in cases if case.slots <= most and case.shuffle in (None, 1)]
    few = tuple(count for count in (1, 4, 17, 32) if count in batches)
    return {
        "full": part("FULL_AND_PIECEWISE"),
        "piecewise": part("PIECEWISE", some=without_control),
        "eager": part("eager", some=without_control),
        "small": part("FULL_AND_PIECEWISE", pool="25%", some=small, resize=False),
        "inline": part("FULL_AND_PIECEWISE", some=without_control, inline="100%"),
        "ahead": part("FULL_AND_PIECEWISE", pool="25%", some=ahead, resize=False, inline="100%", lookahead=4),
        "inline-disk": part(
            "FULL_AND_PIECEWISE", pool=f"{most} rows", some=by_pool, inline="60 rows", some_batches=few
        ),
    }


def workloads(batches: tuple[int, ...]) -> dict[str, list[str]]:
    """Prompts of each batch: decoding together, and long prompts that arrive while others decode."""
    text = (ROOT / "bench" / "results_io.py").read_text(encoding="utf-8")
    prompts = [text[53 * i : 53 * i + 24 + 7 * i] for i in range(max(batches))]
    lengthy = [text[211 * i : 211 * i + 1100 + 160 * i] for i in range(3)]
    mixed = [*prompts[:4], lengthy[0], *prompts[4:20], lengthy[1], *prompts[20:], lengthy[2], *prompts[:5]]
    return {**{f"decode {n}": prompts[:n] for n in batches}, "mixed prefill": mixed}


class Counters:
    """What the service's metrics say about one batch."""

    def __init__(self, service: Any) -> None:
        self._service = service
        self._before = self._now()

    def _now(self) -> dict[str, int]:
        self._service.collect()
        value = self._service.metrics.value
        found = {outcome: int(value("ziggurat_steps_total", outcome)) for outcome in OUTCOMES}
        return {
            **found,
            "passes": int(value("ziggurat_passes_total")),
            "missed": int(value("ziggurat_missed_pairs_total")),
        }

    def taken(self) -> dict[str, int]:
        """Since the object was made."""
        return {key: count - self._before[key] for key, count in self._now().items()}


def run(part: Part) -> bool:
    """True if every case is as it must be."""
    from ziggurat.integration.determinism.engine import open_engine
    from ziggurat.residency.config import TiersConfig

    answers = Path(part.answers)
    reference: dict[str, Outcome] = {}
    first: dict[str, Outcome] = {}  # of this engine's first pool
    if not part.resize or part.inline:
        if not answers.exists():
            print("the answers to compare with are not there: run the part `full` before", flush=True)
            return False
        reference = pickle.loads(answers.read_bytes())
    batches = workloads(part.batches)
    good = True
    with open_engine(MODEL, TiersConfig.from_mapping(part.config), part.debug, **part.engine) as engine:
        for case in part.cases:
            service = engine.service
            if part.resize:
                service.resize(case.slots, slot_seed=case.shuffle)
                if case.slots == ROWS or part.inline:
                    service.warm_start()
                    service.preheated()
            elif part.whole:
                service.preheated()
            _replay(service, enabled=not case.control)
            totals = dict.fromkeys((*OUTCOMES, "passes", "missed"), 0)
            for name in case.only or batches:
                for _ in range(case.repeat):
                    counters = Counters(service)
                    outcome = engine.run(batches[name], part.tokens)
                    expected = reference.setdefault(name, outcome)
                    own = first.setdefault(name, outcome) if part.inline and not case.control else None
                    counts = counters.taken()
                    totals = {key: totals[key] + count for key, count in counts.items()}
                    good &= _judge(case, name, expected, outcome, counts, own)
            good &= _judge_case(part, case, totals)
            good &= _judge_guesses(part, case, service.lookahead.counts().matched)
            if part.resize and not part.inline and case is part.cases[0]:
                answers.write_bytes(pickle.dumps(reference))
        _replay(engine.service, enabled=True)
    return good


def _replay(service: Any, *, enabled: bool) -> None:
    """The negative control leaves missing experts out."""
    runner = service._runner
    runner._settings = dataclasses.replace(runner._settings, replay_enabled=enabled)


def _judge(
    case: Case,
    name: str,
    expected: Outcome,
    found: Outcome,
    counts: dict[str, int],
    own: Outcome | None = None,
) -> bool:
    """Print one line about a batch; whether it is as it must be.

    own: the answer of this engine's first pool, where what is expected is another engine's.
    """
    from ziggurat.integration.determinism.compare import differences

    problems = differences(expected, found)
    if own is not None:
        problems += [f"within this engine: {one}" for one in differences(own, found)]
    if case.control:
        problems = [] if problems else ["replay was off, and nothing differs: this gate proves nothing"]
    elif case.slots == ROWS and (counts["missed"] or counts["passes"] != counts["clean"]):
        problems.append(f"a pool with every row missed: {counts}")
    _say(case, name, len(found.steps), counts, problems)
    return not problems


def _judge_case(part: Part, case: Case, totals: dict[str, int]) -> bool:
    """Print a line if all batches of a case together prove nothing."""
    problems = []
    if case.slots < ROWS and not totals["missed"]:
        problems.append("nothing missed, so nothing was proved")
    repeated = totals["replayed"] + totals["exact"]
    if part.graphs and not case.control and totals["missed"] and not repeated and not part.whole:
        problems.append(f"pairs missed, and no step was repeated: {totals}")
    if part.whole and repeated:
        problems.append(f"every row was in the arena, and steps were repeated: {totals}")
    if problems:
        _say(case, "all batches", 0, dict.fromkeys(totals, 0), problems)
    return not problems


def _judge_guesses(part: Part, case: Case, wanted: int) -> bool:
    """Print a line if layers were to look ahead, and nothing that was guessed was wanted."""
    if not part.config["miss"]["lookahead"] or wanted:
        return True
    _say(case, "all batches", 0, dict.fromkeys((*OUTCOMES, "passes", "missed"), 0), ["no guess was wanted"])
    return False


def _say(case: Case, workload: str, steps: int, counts: dict[str, int], problems: list[str]) -> None:
    line = {
        "case": case.name,
        "workload": workload,
        "steps": steps,
        "passes": counts["passes"],
        "missed": counts["missed"],
        "outcomes": {key: counts[key] for key in OUTCOMES if counts[key]},
        "problems": problems,
    }
    print(MARK + json.dumps(line), flush=True)


if __name__ == "__main__":
    sys.exit(0 if run(Part.from_json(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))) else 1)
