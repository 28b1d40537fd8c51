"""Serves models until it is told to stop: then nobody new is let in, and who is there has a while to finish."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import anyio
import uvicorn
from anyio.abc import TaskGroup

from edge_run.base.errors import ConfigError, EdgeRunError, reason_of
from edge_run.base.interrupt import Interrupt
from edge_run.base.sampling_config import SamplingConfig
from edge_run.devices.host.service_manager import ServiceManager
from edge_run.runtime.generation.model import Model
from edge_run.runtime.processes.drive_thread import at_drive
from edge_run.runtime.server.access import Access
from edge_run.runtime.server.admission import Admission
from edge_run.runtime.server.app import Guard, make_app
from edge_run.runtime.server.catalogue.catalogue import Catalogue
from edge_run.runtime.server.catalogue.folder import ModelEntry, ModelFolder, model_name, read_entry, read_folder
from edge_run.runtime.server.catalogue.served_model import AnswerDefaults
from edge_run.runtime.server.connections import MOST_CONNECTIONS, BoundedListener, BoundedProtocol
from edge_run.runtime.server.service import Service
from edge_run.runtime.server.tasks import task_group

try:
    import resource
except ImportError:  # not a POSIX system
    resource = None  # type: ignore[assignment]

DRAIN_S = 30.0
LAST_RESORT_S = 15  # after that, for those who do not end although they are cancelled
CLOSING_S = 10.0  # of a model at the end, after which somebody is told that it hangs
KEEP_ALIVE_S = 75
BACKLOG = 1024  # connections that the system holds until they are taken
AT_ONCE = 16  # connections that are taken in one step of the event loop: a thousand would stop all others for 70 ms
OTHER_FILES = 1024


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """How a model is served.

    access: who may ask. max_queue: requests that may wait. sampling: where a request says nothing.
    most_tokens: of an answer. drain_s: how long who is there may go on when the server is told to stop.
    certificate, certificate_key: files for TLS, both or none.
    version: of edge-run. has_metrics: `/metrics` is there.
    read_access: says anew who may ask, when SIGHUP comes. manager: of the service, who is told how it stands.
    """

    access: Access
    max_queue: int
    sampling: SamplingConfig
    most_tokens: int | None = None
    drain_s: float = DRAIN_S
    certificate: Path | None = None
    certificate_key: Path | None = None
    version: str = ""
    has_metrics: bool = False
    read_access: Callable[[], Access] | None = None
    manager: ServiceManager = field(default_factory=lambda: ServiceManager(None))


def raise_file_limit() -> None:
    """Let this process have as many open files as connections that it takes, as far as the system allows it."""
    if resource is None:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_CONNECTIONS + OTHER_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def bind(host: str, port: int) -> BoundedListener:
    """Return a socket that listens at the address, so that nobody else can. Raises ConfigError.

    Who connects waits until a server takes connections.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = BoundedListener(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--host {host}: {reason_of(error)}; give an address of this machine") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(BACKLOG)  # two sockets that do not listen yet may have one address
    except OSError as error:
        bound.close()
        raise ConfigError(f"--host {host} --port {port}: {reason_of(error)}; give another one") from error
    return bound


async def serve_model(
    path: Path,
    open_file: Callable[[Path, Interrupt], Model],
    bound: socket.socket,
    options: ServeOptions,
    say: Callable[[str], None],
) -> None:
    """Serve the model of a file on a bound socket until SIGINT or SIGTERM; close both.

    Requests are taken from the start, and wait while the model is opened. open_file: opens it, in a thread, until the
    interrupt ends that. say: told in a line when the model is open, and when the server is about to end.
    Raises what `open_file` raises.
    """
    try:
        entry = await at_drive(read_entry, path)
    except (EdgeRunError, OSError):  # opening it says why, or can do without
        entry = ModelEntry(model_name(path), path)
    await _serve(Catalogue(ModelFolder((entry,)), open_file), path.name, bound, options, say)


async def serve_folder(
    folder: Path,
    open_file: Callable[[Path, Interrupt], Model],
    bound: socket.socket,
    options: ServeOptions,
    say: Callable[[str], None],
) -> None:
    """Serve the models of a folder on a bound socket, one open at a time, until SIGINT or SIGTERM; close all.

    open_file: opens one of them, as for `serve_model`. say: told in a line when the server is ready, when it is about
    to end, and what files are left out.
    Raises ConfigError where there is none.
    """
    found = await at_drive(read_folder, folder)
    catalogue = Catalogue(found, open_file, lambda: read_folder(folder), say)
    _say_left_out(catalogue, say)
    if not found.entries:
        raise ConfigError(f"--models {folder}: has no GGUF file of a model that can be served; name another folder")
    await _serve(catalogue, f"{len(found.entries)} models of {folder.name}", bound, options, say)


async def _serve(
    catalogue: Catalogue,
    what: str,
    bound: socket.socket,
    options: ServeOptions,
    say: Callable[[str], None],
) -> None:
    raise_file_limit()
    admission = Admission(options.max_queue)
    service = Service(catalogue, admission, AnswerDefaults(options.sampling, options.most_tokens), options.version)
    guard = make_app(service, options.access, options.has_metrics)
    line = _ready(what, bound, options)
    server = _Server(_configuration(guard, options))

    async def get_ready() -> None:
        await server.listens.wait()
        if catalogue.is_fixed and (forecast := (await catalogue.open_only()).forecast):
            admission.expect(forecast.first_token_s)
        if not admission.is_closed:
            options.manager.ready(line)
            say(line)

    hears = threading.current_thread() is threading.main_thread()
    async with task_group() as hearing:  # signals, until the model is closed: its drive may hang then too
        if hears:
            hearing.start_soon(_hear_signals, server, guard, service, options, say, name="edge-run-signals")
        async with catalogue, task_group() as group:
            group.start_soon(get_ready, name="edge-run-get-ready")
            try:
                await server.serve(sockets=[bound])
            finally:
                if hears:
                    hearing.start_soon(_watch_closing, say, name="edge-run-watch-closing")
            group.cancel_scope.cancel()
        hearing.cancel_scope.cancel()


class _Server(uvicorn.Server):
    """uvicorn's server, which leaves signals to us. listens: is set when it does."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listens = anyio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen as uvicorn does, but with a deadline for TLS's handshake."""
        config, loop = self.config, asyncio.get_running_loop()
        protocol: Callable[..., asyncio.Protocol] = config.http_protocol_class
        make = partial(protocol, config=config, server_state=self.server_state, app_state={})
        deadline_s = BoundedProtocol.head_s if config.ssl else None
        self.servers = [
            await loop.create_server(
                make, sock=listening, ssl=config.ssl, ssl_handshake_timeout=deadline_s, backlog=AT_ONCE
            )
            for listening in sockets or ()
        ]
        for listening in sockets or ():
            listening.listen(BACKLOG)
        self.started = True
        self.listens.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _configuration(guard: Guard, options: ServeOptions) -> uvicorn.Config:
    return uvicorn.Config(
        guard,
        http=BoundedProtocol,
        ws="none",
        loop="none",
        lifespan="off",
        log_config=None,
        log_level="critical",  # it would say of every malformed request that it is one
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=AT_ONCE,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(options.drain_s) + LAST_RESORT_S,
        ssl_certfile=options.certificate,
        ssl_keyfile=options.certificate_key,
    )


async def _hear_signals(
    server: uvicorn.Server, guard: Guard, service: Service, options: ServeOptions, say: Callable[[str], None]
) -> None:
    """End the server on SIGINT and SIGTERM; on SIGHUP read anew who may ask, the certificate and the models."""
    admission, rereading = service.admission, _Rereading(server, guard, service, options, say)
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals:

        async def told_to_end(reread: Callable[[], object]) -> None:
            async for number in signals:
                if number != signal.SIGHUP:
                    return
                reread()

        async with anyio.create_task_group() as group:
            await told_to_end(lambda: rereading.ask(group))
            group.cancel_scope.cancel()
        options.manager.stopping()
        admission.close()
        server.should_exit = True
        if n_left := admission.n_running + admission.n_waiting:
            say(f"stopping: {n_left} requests have {options.drain_s:g} s to finish; Ctrl-C again ends them at once")
        with anyio.move_on_after(options.drain_s) as draining:
            await told_to_end(lambda: None)
        admission.cancel()
        if draining.cancelled_caught:
            await told_to_end(lambda: None)
        _end_at_next_signal()
        await anyio.sleep_forever()


async def _watch_closing(say: Callable[[str], None]) -> None:
    """Say after a while that the model is being closed still, and have whoever insists end the process."""
    await anyio.sleep(CLOSING_S)
    _end_at_next_signal()
    say("the model is not closed yet, which waits for its drive; Ctrl-C again ends the process")


def _end_at_next_signal() -> None:
    """Have the next Ctrl-C or SIGTERM end the process, whatever hangs."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


class _Rereading:
    """Reads anew what may change while the server runs, in threads: a drive that hangs stops nothing else.

    What is asked meanwhile is done once more afterwards.
    """

    def __init__(
        self,
        server: uvicorn.Server,
        guard: Guard,
        service: Service,
        options: ServeOptions,
        say: Callable[[str], None],
    ) -> None:
        self._server, self._guard, self._service, self._options, self._say = server, guard, service, options, say
        self._is_asked = self._is_at_work = False

    def ask(self, group: TaskGroup) -> None:
        """Begin, in a task of `group`."""
        self._is_asked = True
        if not self._is_at_work:
            self._is_at_work = True
            group.start_soon(self._run, name="edge-run-reread")

    async def _run(self) -> None:
        options = self._options
        while self._is_asked:
            self._is_asked = False
            is_told = self._service.catalogue.is_usable  # else it is not ready yet
            if is_told:
                options.manager.reloading()
            if options.read_access is not None:
                await _reread(self._guard, options.read_access, self._say)
            if self._server.config.ssl is not None:
                await _reread_certificate(self._server.config.ssl, options, self._say)
            await _reread_models(self._service.catalogue, self._say)
            if is_told:
                options.manager.ready("read anew what may change")
        self._is_at_work = False


async def _reread(guard: Guard, read_access: Callable[[], Access], say: Callable[[str], None]) -> None:
    """Let the guard know who may ask now; where that cannot be read, all stays as it is."""
    try:
        guard.access = await at_drive(read_access)
    except EdgeRunError as error:
        say(f"nothing is changed: {error}")
    else:
        say("read anew who may ask")


async def _reread_certificate(context: ssl.SSLContext, options: ServeOptions, say: Callable[[str], None]) -> None:
    """Show clients of `context` the certificate that the files have now; where it cannot be read, the one before."""
    assert options.certificate is not None
    fresh = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    files = options.certificate, options.certificate_key, ""  # no password, or it would ask for one
    try:
        await at_drive(fresh.load_cert_chain, *files)
    except OSError as error:
        names = f"--tls-cert {options.certificate} --tls-key {options.certificate_key}"
        say(f"the certificate stays as it is: {names}: {reason_of(error)}")
    else:
        # Into the same context a certificate would be loaded beside one with a key of another kind.
        context.set_servername_callback(lambda connection, name, before: setattr(connection, "context", fresh))
        say("read the certificate anew")


async def _reread_models(catalogue: Catalogue, say: Callable[[str], None]) -> None:
    if catalogue.is_fixed:
        return
    try:
        await catalogue.read_again()
    except EdgeRunError as error:
        say(f"the models stay as they are: {error}")
    else:
        say(f"{len(catalogue.known.entries)} models")
        _say_left_out(catalogue, say)


def _say_left_out(catalogue: Catalogue, say: Callable[[str], None]) -> None:
    for left_out in catalogue.known.left_out:
        say(f"left out: {left_out.reason}")


def _ready(what: str, bound: socket.socket, options: ServeOptions) -> str:
    host, port = bound.getsockname()[:2]
    scheme = "https" if options.certificate else "http"
    address = f"[{host}]" if ":" in host else host
    return f"serving {what} at {scheme}://{address}:{port}"
