"""`Model`: a model file, opened inside a budget, that generates text."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from edge_run.base.config import MOST_CONTEXT_TOKENS, ModelConfig, ModelOptions
from edge_run.base.errors import ConfigError, NotSupported, option
from edge_run.base.interrupt import Interrupt
from edge_run.base.mesh import Mesh, MeshOptions
from edge_run.base.mesh_status import MeshUse
from edge_run.base.options import Self, Unpack, config_of
from edge_run.base.profile import DeviceProfile
from edge_run.base.protocols import Text
from edge_run.base.results import Forecast, Generation, Numerics, Plan, Progress, Speculation, Stats
from edge_run.base.sampling_config import SamplingConfig, TimedAnswerOptions, TimedChatOptions
from edge_run.runtime.embedding.embedding import embed, embedding_shape
from edge_run.runtime.embedding.results import Embeddings, EmbeddingShape, TextVectors
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.generation.batch import Batch
from edge_run.runtime.generation.batched_answers import BatchedAnswers
from edge_run.runtime.generation.chat import ChatTemplate, template_cell
from edge_run.runtime.generation.continuation import Continuation
from edge_run.runtime.generation.engine_opening import open_engine
from edge_run.runtime.generation.many import ManyAnswers, ManyStream
from edge_run.runtime.generation.meter import Interval, Meter
from edge_run.runtime.generation.model_texts import ModelTexts
from edge_run.runtime.generation.request import Message, Prompt, Request, chat_request, make_request, text_request
from edge_run.runtime.generation.sampling import CandidateTable, OpenGrammar
from edge_run.runtime.generation.speculation_setup import open_session
from edge_run.runtime.generation.stream import Answer, Stream
from edge_run.runtime.grammars.grammar import grammar_text
from edge_run.runtime.grammars.room import GrammarRoom, RoomedGrammar
from edge_run.runtime.inspection.model_kind import check_generates
from edge_run.runtime.keeping.keeper import ConversationRows
from edge_run.runtime.keeping.opening import open_keeper
from edge_run.runtime.llama._ggml import L
from edge_run.runtime.llama.prompt_text import check_room
from edge_run.runtime.planning.planner import Planner, packed
from edge_run.runtime.probing.probe import recall
from edge_run.runtime.processes.workplace import Workplace

_WAITS_AT_EXIT_S = 10.0  # for a pass of another thread; where it does not end, the system frees what there is


class Model(ModelTexts):
    """A model that generates text, inside a memory budget.

    A context manager. A model belongs to the process that opened it: in a forked child its methods raise NotSupported,
    and closing it does nothing. Only `cancel`, `close`, `progress`, `mesh_use` and what turns texts into tokens are
    thread-safe; of the rest, what computes or begins an answer raises ConfigError in a thread that comes while another
    one is at work. One generation runs at a time: starting another one while the first is being iterated ends the
    first, which raises Cancelled when it is asked for its next piece. Use `AsyncModel` to share a model between tasks.

    The class is over 200 lines because it is the whole interface of an open model, and most of it is one call each.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        chat_template: str | None = None,
        config: ModelConfig | None = None,
        mesh: MeshOptions | Mesh | str | None = None,
        interrupt: Interrupt | None = None,
        **options: Unpack[ModelOptions],
    ) -> None:
        """Open the model file at `path` (the first shard of a split one); reading its weights has begun then.

        chat_template: Jinja text or a file, instead of the model's own template.
        config: all options at once.
        mesh: the mesh whose devices share the model: an open one, the address of its broker (`mqtt://host:1883`), or ""
            for the mesh that this device joined.
        interrupt: ends the opening, which raises Cancelled then, and what is computed.
        options: single fields of `ModelConfig`, `memory` above all: the budget of the whole process, as bytes or
            `4GiB`; None is the memory available, less a margin.

        Raises ModelFileError, BudgetError, ConfigError, KernelError, NotSupported, TierReadError, MeshError.
        """
        config = config_of(ModelConfig, config, options, ("chat_template", "config", "mesh", "interrupt"))
        self.path = Path(path)
        self._running: Answer | BatchedAnswers | None = None  # the last, which the next one ends
        self._templates, self._grammars = template_cell(), GrammarRoom(self.path)
        self._engine = open_engine(self.path, config, mesh, interrupt)
        engine = self._engine
        self._workplace = Workplace(self.path, engine.interrupt, engine.close, engine.model.visitors)
        self._notices: list[str] = []
        self._salt = ""  # of what the conversation at hand is for
        weakref.finalize(self, self._workplace.close, _WAITS_AT_EXIT_S)
        try:
            self._engine.tell(self._notices.append)
            self._session = open_session(self._engine)
            self._keeper = open_keeper(self._engine, self._notices.append)
            if self._keeper:
                self._session.keeper = self._keeper
                self._engine.before_closing(self._keeper.close)
            self._template = ChatTemplate.from_model(
                self.metadata,
                self._special(self._engine.model.bos_token),
                self._special(L.llama_vocab_eos(self._vocab)),
                chat_template,
                self._templates,
            )
        except BaseException:
            self.close()
            raise
        self._meter = Meter(self._engine)
        self._table = CandidateTable(self._vocab, self._engine.model.vocabulary)

    def __enter__(self) -> Self:
        self._workplace.check()
        return self

    @property
    def plan(self) -> Plan:
        """What goes where, decided when the model was opened."""
        return self._engine.plan

    @property
    def numerics(self) -> Numerics:
        """The numerics key: models with equal keys compute equal logits, bit for bit."""
        return self._engine.numerics

    @property
    def trained_context_tokens(self) -> int:
        """The longest context that the model was trained on; 0 where its file does not say."""
        return max(0, self._opened.model.trained_context_tokens)

    def metadata(self, key: str) -> str | None:
        """Return what the model file says under a key, such as `general.architecture`; None where it says nothing."""
        return self._opened.model.metadata(key)

    @property
    def stats(self) -> Stats:
        """Figures since the model was opened."""
        return self._meter.stats()

    @property
    def speculation(self) -> Speculation:
        """What speculation did since the last prompt, or since the batch was opened whose answers share passes.

        Before one, its mode and why it is off or limited.
        """
        return self._running.speculation if self._running else self._session.speculation()

    @property
    def mesh_use(self) -> MeshUse | None:
        """How the model is spread over devices now; None where it is not. Any thread may ask."""
        return self._engine.mesh_use

    @property
    def notices(self) -> tuple[str, ...]:
        """What could not be done since the model was opened, and the work goes on without, a line each."""
        return tuple(self._notices)

    def keep_answers(self, rows: ConversationRows | None = None) -> None:
        """Keep answers in the prompt cache too, from here on; without such a cache, do nothing.

        rows: `conversation_rows` of a conversation that goes on: they come back with its next prompt.
        """
        if self._keeper:
            self._keeper.keeps_answers = True
            if rows:
                self._keeper.expect(rows)

    @property
    def keeps_prompts(self) -> bool:
        """Whether there is a prompt cache, which all requests share."""
        return self._keeper is not None

    @property
    def conversation_rows(self) -> ConversationRows | None:
        """What the prompt cache knows the conversation so far by; None without such a cache."""
        return self._keeper.rows if self._keeper else None

    @property
    def progress(self) -> Progress | None:
        """How far the prompt or token at hand is; None between them. Any thread may ask."""
        return self._engine.timeline.snapshot()

    def expect(self, profile: DeviceProfile | None = None) -> None:
        """Let `progress` say what remains as the device of `profile` (see `edge_run.probe`) would take.

        None is this device, as far as it was measured.
        """
        if known := profile or recall(self._opened.gguf, self._opened.config):
            self._opened.expect(known)

    def forecast(self, prompt_tokens: int | None = None, *, is_packed: bool = False) -> Forecast | None:
        """Return how fast it is expected to be, for a prompt of so many tokens; of as many answers as can share a pass.

        None where this device was not measured (see `edge_run.probe`), and on a mesh.
        prompt_tokens: as of `edge_run.plan`, and refused as there, where there is a forecast.
        is_packed: as it would be if `edge-run pack` had written its weights repacked; None also where that has no use.
        """
        engine = self._opened
        profile = recall(engine.gguf, engine.config) if engine.mesh_use is None else None
        if profile is None or engine.prepared.known is None:
            return None
        planner = Planner(engine.prepared)
        found = packed(planner, engine.plan) if is_packed else (planner, engine.plan)
        return found[0].timed(found[1], profile, prompt_tokens).forecast if found else None

    @property
    def _opened(self) -> Engine:
        self._workplace.check()
        return self._engine

    def generate(self, prompt: Text, **options: Unpack[TimedAnswerOptions]) -> Stream:
        """Continue `prompt` (text, or tokens); iterate over the result for pieces, or call its `result()`.

        options: `max_tokens`, None is until the model ends or the context is full; `sampling`, a `SamplingConfig`, or
            single fields of one; `marks`, control tokens, by their texts, that are a part of the answer's text;
            `on_read`, which is told how many tokens of the prompt are read, as of `Request`; `deadline_s`, the seconds
            after which the answer ends as it is, with the reason `deadline`.

        Raises ConfigError at once, and ContextFull for a text that is too long; iterating raises TierReadError,
        ModelFileError, KernelError, NotSupported (no token fits the grammar, or the grammar takes too
        much to find one), and on a mesh MeshError.
        """
        return self._start(text_request(prompt, **options))

    def complete(self, prompt: Text, **options: Unpack[TimedAnswerOptions]) -> Generation:
        """Continue `prompt` and return the finished answer; arguments as for `generate`."""
        return self.generate(prompt, **options).result()

    def stream_chat(self, messages: Sequence[Message], **options: Unpack[TimedChatOptions]) -> Stream:
        """Answer a conversation of `{"role", "content"}` messages, a content as text or parts of text; see `generate`.

        options: those of `generate`, and `drops_oldest`: leave out the oldest turns, never the system prompt, of a
            conversation that has no room in the context, or none for its answer; `Generation.dropped_messages` says how
            many messages those were. The rest is read anew. `tools`, `tool_choice`: what the answer may call, or must,
            as of `Request`; `Generation.tool_calls` are the calls, and messages may have earlier ones, and results.

        Raises NotSupported when the model has no chat template.
        """
        return self._start(chat_request(messages, **options))

    def chat(self, messages: Sequence[Message], **options: Unpack[TimedChatOptions]) -> Generation:
        """Answer a conversation and return the finished answer; arguments as for `stream_chat`."""
        return self.stream_chat(messages, **options).result()

    def generate_many(
        self,
        prompts: Iterable[Prompt | Request],
        *,
        max_parallel: int | None = None,
        **options: Unpack[TimedAnswerOptions],
    ) -> ManyStream:
        """Answer many prompts in passes that they share; iterate for `(number, piece)`, or call `results()`.

        prompts: texts, tokens, conversations, or a `Request` of one with settings of its own. They are taken as there
            is room for them, so that there may be any number.
        max_parallel: answers that share a pass at most; None is as many as the model was opened for (`sequences`).
        options: those of `generate`, for prompts that are no `Request`, which have their own, tools among them.

        Answers that share passes may differ from an answer alone where the two best tokens are nearly equal
        (`numerics.batching`). With `exact` they do not. With `exact` or `kv_spill` each has an equal part of the
        context, and prompts are read one after the other. Raises ConfigError at once; iterating raises what `generate`
        raises of the drive and of llama.cpp. What is wrong with one request comes as its error.
        """
        if max_parallel is not None and max_parallel < 1:
            raise ConfigError(f"max parallel {max_parallel}: must be at least 1 answer")
        if isinstance(prompts, str | bytes | Mapping):
            raise ConfigError(f"prompts {prompts!r:.60}: is one prompt; give several, such as a list of them")
        usual = make_request("", **options)
        many = ManyAnswers(self._open_answers(), self._workplace, prompts, usual, self.begin, max_parallel)
        return ManyStream(self, many, self._workplace)

    def embed(
        self,
        texts: Text | Iterable[Text],
        *,
        normalize: bool = True,
        truncate: bool = False,
        on_text: Callable[[TextVectors], object] | None = None,
    ) -> Embeddings:
        """Return the vectors of texts; of a model that was opened for that (`embeddings`), as encoders are.

        texts: one or several, each as text or as tokens; text gets the model's own first and last tokens. Of a list
            all are looked at before any is computed; another iterable is asked for texts as there is room for them.
        normalize: whether vectors get length 1. truncate: whether a text that is too long is cut. on_text: is given
            the vectors of each text when it has them; they are not kept besides, so that any number of texts has room.

        Texts share passes, as many as the model was opened for (`sequences`): then the last digits of a vector depend
        on the texts beside it (`numerics.batching`). Opened for one, or with `exact`, each is computed alone, and its
        vector is llama.cpp's to the bit. Raises ContextFull for a text that is too long, NotSupported where the model
        was opened to generate text, Cancelled after `cancel`, and what `generate` raises of the drive.
        """

        def work() -> Embeddings:
            if self._engine.embedder is not None:
                self._end_running()
            found = embed(self.path, self._engine, texts, normalize, truncate, on_text)
            self._meter.count(sum(found.tokens), 0, Interval())
            return found

        return self._workplace.do(work)

    @property
    def embedding(self) -> EmbeddingShape | None:
        """What its vectors are like; None where the model was opened to generate text."""
        return embedding_shape(self._opened)

    @property
    def most_parallel(self) -> int:
        """The answers that can share a pass."""
        return self._opened.config.sequences

    def open_batch(self) -> Batch:
        """Return an empty batch, for requests that come as they come; any other generation ends it."""
        return Batch(self, self._open_answers(), self._workplace)

    def _open_answers(self) -> BatchedAnswers:
        def work() -> BatchedAnswers:
            self._end_running()
            self._engine.interrupt.reset()
            self._session.forget()
            made = BatchedAnswers(self._engine, self._meter, self.most_parallel, keeper=self._keeper)
            self._running = made
            return made

        return self._workplace.do(work)

    def cancel(self) -> None:
        """End the running generation, from any thread: its stream finishes with reason `cancelled`."""
        self._engine.interrupt.cancel()

    def close(self) -> None:
        """Free the model, from any thread; what another one computes is cancelled, and ends first. Idempotent."""
        self._workplace.close(first=self._close_running)
        self._templates.close()
        self._grammars.close()

    def _start(self, request: Request) -> Stream:
        return self._workplace.do(partial(self._start_here, request))

    def _start_here(self, request: Request) -> Stream:
        continuation = self.begin(request)
        try:
            self._end_running()
            self._engine.interrupt.reset()
            self._running = None
            if request.turn.salt != self._salt:
                self._session.forget()
                self._salt = request.turn.salt
            if self._engine.draft:
                self._engine.draft.belong(0, request.turn.salt)
            deadline_s = request.turn.deadline_s
            self._running = answer = Answer(self._engine, self._session, self._meter, continuation, deadline_s)
            return Stream(self, answer, self._workplace)
        except BaseException:
            continuation.close()
            raise

    def open_grammar(self, sampling: SamplingConfig) -> RoomedGrammar | None:
        """Open the grammar of an answer, for `begin`, from any thread: it may take seconds. None where it has none."""
        name, text = grammar_text(sampling)
        return self._grammars.open(name, text, self._opened.model.vocabulary) if name else None

    def begin(self, request: Request, grammar: RoomedGrammar | None = None) -> Continuation:
        """Return the beginning of the answer to a request, which closes its `grammar`. Raises what is wrong with it."""
        if self.embedding:
            check_generates(self._opened.gguf)
            given = option("embeddings")
            raise NotSupported(f"{self.path}: was opened for embeddings, not for text; leave out {given}")
        read = self._read(request)
        check_room(len(read.tokens), self.context_tokens)
        engine = self._opened
        room_tokens = engine.front.capabilities.context_tokens
        has_end = request.max_tokens is not None or not engine.config.context_shift
        most_tokens = request.max_tokens if has_end else MOST_CONTEXT_TOKENS
        sampling = request.sampling if grammar else self.sampling_of(request)  # a grammar was made of that already
        open_grammar: OpenGrammar = (lambda _: grammar) if grammar else self.open_grammar
        answer = Continuation(  # last, as nobody would close it, nor its grammar, where anything else raises
            engine.model, read.tokens, most_tokens, sampling, room_tokens, open_grammar, self._table
        )
        answer.dropped_messages, answer.on_read = read.dropped_messages, request.on_read
        answer.marks, answer.parser = read.marks, read.parser
        return answer

    def _end_running(self) -> None:
        """End what is being answered, as another answer begins."""
        if self._running:
            self._running.give_way()

    def _close_running(self) -> None:
        if self._running:
            self._running.close()
