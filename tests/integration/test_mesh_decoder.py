"""A decoder over a mesh: the tokens of one device, also when devices die, refuse, hang, or the user stops it.

In one process, over a mesh made of queues; with real processes and a real broker in test_mesh_processes.py.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import anyio
import pytest

from edge_run import Model
from edge_run.base.config import ModelConfig
from edge_run.base.errors import Cancelled, DeviceLost
from edge_run.base.fields import Document
from edge_run.base.interrupt import Interrupt
from edge_run.base.mesh import MeshOptions, Unled
from edge_run.base.sampling_config import SamplingConfig
from edge_run.partition.mesh_plan import DeviceSpec, MeshPlan, UnitWork
from edge_run.partition.mesh_ring import Hops
from edge_run.runtime.decoding.session import Session
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.generation.speculation_setup import open_session
from edge_run.runtime.mesh import coordinator, device_group
from edge_run.runtime.mesh import run as mesh_run
from edge_run.runtime.mesh.engine import open_mesh_engine
from in_child import in_child
from mesh_runs import CHUNK_BYTES, OPTIONS, PROMPT, Run, alone, answers, greedy, running
from tiny_models import make_model
from waiting import until


@pytest.mark.parametrize("name", ["granite", "granitehybrid", "qwen3moe"])
@in_child
def test_tokens_are_those_of_one_device_also_when_one_dies(name: str, folder: Path) -> None:
    path = make_model(name, folder)
    wanted = alone(path)
    with running(path) as run:
        assert greedy(run.engine) == wanted
        run.engine.front.rewind(0, 0)
        assert greedy(run.engine, at=lambda i: run.hub.kill("b") if i == 5 else None) == wanted
        use = run.engine.mesh_use
        assert use is not None
        assert [node.node for node in use.nodes] == ["a", "c"]
        assert use.recoveries == 1
        assert any("lost" in line for line in run.said)
        run.engine.front.rewind(0, 0)
        assert greedy(run.engine, at=lambda i: run.hub.kill("c") if i == 9 else None) == wanted, "alone, in the end"


@pytest.mark.parametrize("exact", [False, True])
@in_child
def test_many_answers_share_passes_on_a_mesh_also_when_devices_die(exact: bool, folder: Path) -> None:
    """With `exact`, to the bit: what is chosen cannot depend on who shares a pass, nor on who computes it."""
    path = make_model("llama", folder)
    prompts = [PROMPT[: 5 + 9 * i] for i in range(6)]
    options = {**OPTIONS, "context_tokens": 2048, "sequences": 4, "exact": exact}
    engine = Engine.open(path, ModelConfig(memory="4GiB", **options))
    wanted = answers(engine, prompts)
    engine.close()
    with running(path, options=options) as run:
        assert answers(run.engine, prompts) == wanted
        found = answers(run.engine, prompts, at=lambda i, batch: run.hub.kill("b") if i == 6 else None)
        use = run.engine.mesh_use
        assert use is not None
        assert use.recoveries == 1
        assert found == wanted


@pytest.mark.parametrize("name", ["llama", "qwen3moe", "gemma2"])
@in_child
def test_a_long_log_that_was_condensed_gives_the_same_answers_when_a_device_dies(name: str, folder: Path) -> None:
    """To the bit, with `exact`; answers that have ended are not computed again."""
    path = make_model(name, folder)
    mesh_run.MOST_CONTEXTS = 0  # so it is condensed again and again
    prompts = [PROMPT[: 5 + 9 * i] for i in range(6)]
    options = {**OPTIONS, "context_tokens": 1024, "sequences": 4, "exact": True}
    with running(path, options=options) as run:
        wanted = answers(run.engine, prompts)
        log = run.engine.front._run.log  # type: ignore[attr-defined]
        assert len(log) == 0, "nobody holds anything"
        for moment in (4, 9, 14):
            if moment > 4:  # the one before has died
                run.workers["b"].close()
                run.workers["b"] = run.join("b")
            lengths: list[int] = []

            def strike(i: int, batch: object, moment: int = moment, lengths: list[int] = lengths) -> None:
                lengths.append(log.tokens)
                if i == moment:
                    run.hub.kill("b")

            assert answers(run.engine, prompts, at=strike) == wanted, moment
            assert len(log) == 0
            assert max(lengths) <= sum(map(len, prompts)) + 12 * 6
            run.hub.kill("b")


@pytest.mark.parametrize("name", ["llama", "granitehybrid"])
@in_child
def test_who_stops_a_pass_before_it_began_here_can_go_on_also_without_a_device(name: str, folder: Path) -> None:
    """State that cannot be cut stayed here, and was forgotten by the log."""
    path = make_model(name, folder)
    wanted = alone(path)
    with running(path) as run:
        session = Session(run.engine.front)
        logits, _ = session.feed(PROMPT)

        def press(source: str, target: str, header: Document) -> None:
            if header.get("what") == "decode" and target == "c":
                run.hub.on_send = lambda *a: None
                raise KeyboardInterrupt

        said: list[int] = []
        while len(said) < len(wanted):
            said.append(int(logits.argmax()))
            if len(said) == 4:
                run.hub.on_send = press
                with pytest.raises(KeyboardInterrupt):
                    session.step(said[-1])
                logits, _ = session.feed([*PROMPT, *said])
            else:
                logits = session.step(said[-1])
            if len(said) == 8:
                run.hub.kill("b")
            assert run.engine.front._run.log.tokens == len(session.history)  # type: ignore[attr-defined]
        assert said == wanted


@in_child
def test_a_batch_over_a_mesh_also_when_a_device_dies(folder: Path) -> None:
    """What `edge-run batch --mesh` does, with all its answers in passes that devices share."""
    pytest.importorskip("starlette")
    from edge_run.runtime.batches.answering import PlacesHere
    from edge_run.runtime.batches.results_file import ResultsFile
    from edge_run.runtime.batches.run import BatchProgress, BatchRun

    bodies = [{"prompt": PROMPT[: 5 + 9 * i], "max_tokens": 12, "logprobs": 1} for i in range(6)]
    lines = [{"custom_id": f"n{i}", "url": "/v1/completions", "body": body} for i, body in enumerate(bodies)]
    (folder / "in").write_text("\n".join(map(json.dumps, lines)))

    def answer_all(model: Model, path: Path, at: Callable[[int], None] = lambda done: None) -> list[object]:
        async def main() -> None:
            async with PlacesHere.of(model, SamplingConfig(temperature=0)) as places:
                progress = BatchProgress(len(bodies))
                with ResultsFile(path) as results:
                    run = BatchRun(folder / "in", results, progress, lambda: at(progress.done), is_in_order=True)
                    await run.run(places)

        anyio.run(main)
        found = [json.loads(one)["response"]["body"]["choices"][0] for one in path.read_text().splitlines()]
        return [(one["text"], one["logprobs"]["tokens"]) for one in found]

    path = make_model("llama", folder)
    options = {**OPTIONS, "context_tokens": 2048, "sequences": 3, "exact": True}
    wanted = answer_all(Model(path, config=ModelConfig(memory="4GiB", **options)), folder / "alone")
    with running(path, options=options) as run:
        run.engine.close()
        model = Model(run.path, config=run.config, mesh=run.mesh)
        found = answer_all(model, folder / "mesh", at=lambda done: run.hub.kill("b") if done == 2 else None)
    assert len(found) == len(bodies)
    assert found == wanted


@in_child
def test_a_model_says_who_computes_what_before_and_after_one_dies(folder: Path) -> None:
    with running(make_model("llama", folder)) as run:
        run.engine.close()
        with Model(run.path, config=run.config, mesh=run.mesh) as model:
            use = model.mesh_use
            assert use is not None
            assert [node.node for node in use.nodes] == ["a", "b", "c"]
            blocks = [block for node in use.nodes for block in node.blocks]
            assert sorted(blocks) == [*range(len(blocks))]
            run.hub.kill("b")
            model.generate(PROMPT, max_tokens=2, temperature=0).result()
            use = model.mesh_use
            assert use is not None
            assert [node.node for node in use.nodes] == ["a", "c"]


@in_child
def test_a_device_that_dies_in_the_middle_of_a_pass(folder: Path) -> None:
    path = make_model("gemma2", folder)
    wanted = alone(path)
    for victim in "bc":
        for moment in (1, 40, 77):
            with running(path) as run:
                sent = iter(range(10_000))

                def strike(source: str, target: str, header: Document, run: Run = run, sent: Iterator[int] = sent,
                           victim: str = victim, moment: int = moment) -> None:  # fmt: skip
                    if header["kind"] == "activation" and next(sent) == moment:
                        run.hub.kill(victim)

                run.hub.on_send = strike
                assert greedy(run.engine) == wanted


@in_child
def test_a_link_between_two_workers_that_breaks_costs_no_more_than_a_device_that_dies(folder: Path) -> None:
    """Both are there, and the one that hands nothing on says so: else the coordinator would wait, a long time."""
    path = make_model("llama", folder)
    wanted = alone(path)
    device_group.LEAST_DEADLINE_S = 60.0
    with running(path) as run:
        run.mesh.lead = lambda **given: run.mesh.epoch  # type: ignore[method-assign]  # as where nobody else led

        def cut(source: str, target: str, header: Document) -> None:
            if {source, target} == {"b", "c"}:
                raise DeviceLost("the connection broke", node=target)

        started = time.monotonic()
        assert greedy(run.engine, at=lambda i: setattr(run.hub, "on_send", cut) if i == 5 else None) == wanted
        assert time.monotonic() - started < 50, "less than the least deadline of a pass"
        use = run.engine.mesh_use
        assert use is not None
        assert len(use.nodes) == 2
        assert use.recoveries == 1
        assert any("name of b does not reach name of c" in line for line in run.said), run.said


def plan_by_links(works: Sequence[UnitWork], specs: Sequence[DeviceSpec], hops: Hops) -> MeshPlan:
    """Return a plan over all devices, each with layers in one place, in the order whose links are the fastest."""
    first, *others = (spec.node for spec in specs)

    def ring_s(order: tuple[str, ...]) -> float:
        return sum(hops(source, target).token_s for source, target in itertools.pairwise((first, *order, first)))

    order, n_theirs = min(itertools.permutations(others), key=ring_s), len(works) - 2
    theirs = (order[number * len(order) // n_theirs] for number in range(n_theirs))
    return MeshPlan((first, *theirs, first), 1, 0.05, {})


@pytest.mark.parametrize(("broken", "lost"), [(("bc",), ""), (("bc", "bd"), "b"), (("bc", "dc"), "c")])
@in_child
def test_of_devices_that_do_not_reach_each_other_only_the_one_that_is_cut_off_is_done_without(
    broken: tuple[str, ...], lost: str, folder: Path
) -> None:
    """One whose network had broken had the run give up all the others, which were there, and held their weights."""
    path = make_model("llama", folder)
    wanted = alone(path)
    with running(path, "bcd") as run:
        coordinator.plan_ring = plan_by_links
        run.open_anew()
        run.mesh.lead = lambda **given: run.mesh.epoch  # type: ignore[method-assign]  # as where nobody else led

        def cut(source: str, target: str, header: Document) -> None:
            if source + target in broken:
                raise DeviceLost("the connection broke", node=target)

        assert greedy(run.engine, at=lambda i: setattr(run.hub, "on_send", cut) if i == 5 else None) == wanted
        use = run.engine.mesh_use
        assert use is not None
        assert {node.node for node in use.nodes} == set("abcd") - set(lost), run.said
        assert use.recoveries == len(broken), run.said
        until(lambda: all(run.workers[node]._engine is None for node in lost))


@in_child
def test_an_opening_that_is_broken_off_leaves_no_lease_and_nothing_open_on_others(folder: Path, tmp_path: Path) -> None:
    path = make_model("llama", folder)
    fresh = ModelConfig(memory="4GiB", cache_folder=tmp_path, chunk_bytes=CHUNK_BYTES, **OPTIONS)  # type: ignore[arg-type]

    def open_with(**options: object) -> None:
        open_mesh_engine(path, fresh, mesh, MeshOptions(**options))  # type: ignore[arg-type]

    def interrupt(text: str) -> None:
        raise KeyboardInterrupt

    class Pressed(Interrupt):
        def check(self) -> None:
            raise KeyboardInterrupt

    with running(path) as run:
        run.engine.close()
        assert not run.mesh.is_leading
        mesh = run.hub.join("d")
        with pytest.raises(KeyboardInterrupt):  # while the file is looked at
            open_with(interrupt=Pressed())
        assert not mesh.epoch
        with pytest.raises(KeyboardInterrupt):  # as soon as there is a plan to be told
            open_with(say=interrupt)
        assert mesh.epoch, "it had led"
        assert not mesh.is_leading
        assert {worker._engine for worker in run.workers.values()} == {None}


@in_child
def test_who_stops_an_answer_stops_all_and_can_go_on(folder: Path) -> None:
    path = make_model("llama", folder)
    wanted = alone(path)
    with running(path) as run:

        def stop(source: str, target: str, header: Document) -> None:
            if header["kind"] == "activation" and source == "b":
                run.engine.interrupt.cancel()

        run.hub.on_send = stop
        with pytest.raises(Cancelled):
            greedy(run.engine)
        run.hub.on_send = lambda *a: None
        run.engine.interrupt.reset()  # another activation may have been handed over meanwhile
        assert greedy(run.engine) == wanted


@in_child
def test_a_worker_of_a_past_epoch_is_not_heard(folder: Path) -> None:
    path = make_model("llama", folder)
    wanted = alone(path)
    with running(path) as run:

        def replay(i: int) -> None:
            if i == 5:
                run.hub.kill("b")
            if i == 9:  # b was only cut off: it says what it had to say, late
                header = {"kind": "activation", "epoch": 65536, "number": 8, "round": 1, "unit": 2, "spent": {}}
                run.hub.gone.discard("b")
                run.hub.members["b"].send("a", header, [memoryview(bytes(1024))], timeout_s=1)
                run.hub.members["b"].send("c", header, [memoryview(bytes(1024))], timeout_s=1)

        assert greedy(run.engine, at=replay) == wanted


@in_child
def test_when_another_leads_this_device_goes_on_alone(folder: Path) -> None:
    path = make_model("llama", folder)
    wanted = alone(path)
    with running(path) as run:

        def depose(i: int) -> None:
            if i == 6:
                run.hub.can_lead = False
                run.mesh.events.put(Unled(run.mesh.epoch))

        assert greedy(run.engine, at=depose) == wanted
        use = run.engine.mesh_use
        assert use is not None
        assert [node.node for node in use.nodes] == ["a"]


@pytest.mark.parametrize("most_contexts", [0, 2])
@in_child
def test_guesses_are_verified_over_the_mesh(most_contexts: int, folder: Path) -> None:
    """Branches, rewinds and passes of several tokens, also across the loss of a device, and from a condensed log."""
    mesh_run.MOST_CONTEXTS = most_contexts
    path = make_model("llama", folder)
    options = {**OPTIONS, "speculate": "ngram", "exact": True}
    plain = Engine.open(path, ModelConfig(memory="4GiB", **{**OPTIONS, "exact": True}))
    wanted = greedy(plain, 24)
    plain.close()
    with running(path, options=options) as run:
        session = open_session(run.engine)
        logits, _ = session.feed(PROMPT)
        said = []
        for i in range(24):
            if i == 9:
                run.hub.kill("b")
            said.append(int(logits.argmax()))
            logits = session.step(said[-1])
        assert said == wanted
        assert session.speculation().passes > 0


@pytest.mark.parametrize("name", ["granite", "kimi-linear"])
@in_child
def test_activations_are_packed_for_slow_links_and_rounded_only_when_asked(name: str, folder: Path) -> None:
    """At 500 B/s: whatever coding takes here, on a busy machine too, the link takes longer. A device dies, too."""
    path = make_model(name, folder)
    wanted = alone(path)
    with running(path, bytes_per_s=5e2) as run:
        assert greedy(run.engine, at=lambda i: run.hub.kill("b") if i == 5 else None) == wanted
        use = run.engine.mesh_use
        assert use is not None
        assert set(use.activations) <= {"packed", "plain"}
        assert use.activations["packed"] > 16
        assert 0.8 < use.sent_bytes / use.plain_bytes < 0.95
        assert run.engine.numerics.mesh_activations == "exact"
    with running(path, options={**OPTIONS, "mesh_activations": "compact"}, bytes_per_s=5e2) as run:
        assert len(greedy(run.engine, at=lambda i: run.hub.kill("b") if i == 5 else None)) == len(wanted)
        use = run.engine.mesh_use
        assert use is not None
        assert use.activations["compact"] > 16
        assert use.sent_bytes / use.plain_bytes < 0.5
        assert run.engine.numerics.mesh_activations == "compact"
        assert any("may differ" in line for line in run.said)
