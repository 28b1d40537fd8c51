"""The connection to the MQTT broker: a thread that connects, subscribes, passes messages on, and reconnects.

The channel knows bytes and topics; `node.py` knows what they mean. A message that cannot be sent now is dropped: the
publisher is told, and sends what still matters once the connection is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from edge_run.base.errors import ConfigError, EdgeRunError, MeshError, from_system
from edge_run.base.extras import MESH, need
from edge_run.devices.link.hosts import place_text
from edge_run.devices.members.cluster import Broker
from edge_run.devices.mesh.home_assistant import PlainMessage
from edge_run.devices.messages.outgoing import Outgoing

logger = logging.getLogger(__name__)

KEEPALIVE_S, CONFIRM_S = 20, 10.0
END_S = 10.0  # of the thread: an attempt to connect takes 5 s, and is not broken off
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 15.0
MOST_DOUBLINGS = 16  # of a wait, however often it failed
NICENESS = 5  # of the thread: what is said here has seconds, and threads that compute wait for each other
MOST_QUEUED = 1000


@dataclass(frozen=True, slots=True)
class ChannelCallbacks:
    """What a channel calls, on its own thread.

    find: returns the broker.
    make_will: returns the last will of the next connection.
    on_message: takes a topic, a payload, and whether the broker had kept it.
    on_change: takes whether there is a connection, and where, or why not.
    on_tick: does what is due, and returns in how many seconds it wants to be called again.
    on_end: takes why the channel ends though nobody closed it.
    """

    find: Callable[[], Broker]
    make_will: Callable[[], Outgoing]
    on_message: Callable[[str, bytes, bool], None]
    on_change: Callable[[bool, str], None]
    on_tick: Callable[[], float]
    on_end: Callable[[str], None]


@dataclass(eq=False, repr=False, kw_only=True)
class _Refusal(MeshError):
    """The broker does not take who connects as `user`, empty for nobody."""

    user: str


class Channel:
    """A thread that keeps one connection to the broker.

    is_up: whether there is a connection.
    why_down: why there is none; while one is tried for, what it would be if nothing answered.
    refused_user: as whom the broker refused this device last, empty for nobody; None where that is not why it is down.
    """

    def __init__(
        self, name: str, topics: Sequence[str], callbacks: ChannelCallbacks, authority: str | None = None
    ) -> None:
        self._name, self._topics, self._callbacks, self._authority = name, tuple(topics), callbacks, authority
        self._loop: asyncio.AbstractEventLoop | None = None
        self._outbox: asyncio.Queue[Outgoing | PlainMessage] = asyncio.Queue(MOST_QUEUED)
        self._ended, self._tick, self._stale = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.is_up = self._was_up = self._is_ending = self._is_nobody = False
        self.refused_user: str | None = None
        self.why_down = "the broker was not reached yet"
        self._started, self._failure = threading.Event(), ""
        self._thread = threading.Thread(target=self._run, name="edge-run mesh", daemon=True)

    def start(self) -> None:
        """Begin to connect. Raises MeshError where the system refuses what that takes."""
        self._thread.start()
        self._started.wait()
        if self._failure:
            raise MeshError(self._failure)

    def publish(self, message: Outgoing | PlainMessage) -> bool:
        """Send a message soon; return whether there is a connection to send it on. From any thread."""
        if not self.is_up or self._is_ending:
            return False
        return self._call(self._put, message)

    def hurry(self) -> None:
        """Call on_tick now. From any thread."""
        self._call(self._tick.set)

    def reconnect(self) -> None:
        """End the connection to the broker, and make another one. From any thread."""
        self._call(self._stale.set)

    def close(self) -> None:
        """Send what waits, for a second at most, then disconnect and end the thread. Idempotent."""
        self._is_ending = True
        self._call(self._ended.set)
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join(timeout=END_S)

    def _call(self, function: Callable[..., object], *arguments: object) -> bool:
        if self._loop is None:  # it was not started
            return False
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # it was closed meanwhile
            return False
        return True

    def _put(self, message: Outgoing | PlainMessage) -> None:
        try:
            self._outbox.put_nowait(message)
        except asyncio.QueueFull:
            logger.warning("%s: dropped, %d messages wait already", message.topic, MOST_QUEUED)

    def _run(self) -> None:
        with contextlib.suppress(AttributeError, OSError):  # not on every system
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        try:
            with contextlib.closing(self._main()) as main:
                asyncio.run(main)
        except OSError as error:  # there is no loop: it takes an epoll and two sockets
            self._failure = str(from_system(error, "mesh: connecting to the broker"))
        finally:
            self._started.set()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._started.set()
        tasks = [
            asyncio.create_task(self._keep_connected(), name="edge-run mesh connection"),
            asyncio.create_task(self._keep_ticking(), name="edge-run mesh ticks"),
            asyncio.create_task(self._ended.wait(), name="edge-run mesh end"),
        ]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            if not task.cancelled() and (error := task.exception()) is not None:
                logger.error("mesh: a mistake of edge-run's own", exc_info=error)
                self.why_down = f"a mistake of edge-run's own: {error!r}"
                self._callbacks.on_end(self.why_down)  # which may still say something
        self._is_ending = True
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep_ticking(self) -> None:
        while not self._is_ending:  # until Python 3.12, wait_for forgets to be cancelled when what it awaits comes
            wait_s = self._callbacks.on_tick()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._tick.wait(), wait_s)
            self._tick.clear()

    async def _keep_connected(self) -> None:
        attempt, was_ever_up = 0, False
        while True:
            self._was_up, why, user = False, "the connection to the broker ended", None
            try:
                broker = await asyncio.to_thread(self._callbacks.find)
                if not attempt and not was_ever_up:  # who waits for it may not wait for as long as the attempt takes
                    self.why_down = explain(TimeoutError(), broker)
                await self._stay_connected(broker)
            except (EdgeRunError, OSError) as error:
                why, user = str(error), error.user if isinstance(error, _Refusal) else None
            self.is_up, self.refused_user, self.why_down = False, user, why
            self._callbacks.on_change(False, why)
            attempt, was_ever_up = 0 if self._was_up else attempt + 1, was_ever_up or self._was_up
            longest_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** min(attempt, MOST_DOUBLINGS))
            await asyncio.sleep(longest_s * random.uniform(0.3, 1.0))

    async def _stay_connected(self, broker: Broker) -> None:
        """Serve one connection until it ends. Raises MeshError, which says why."""
        aiomqtt = need("aiomqtt", MESH)
        while not self._outbox.empty():  # of the connection before
            self._outbox.get_nowait()
            self._outbox.task_done()
        is_nobody = broker.is_offered and self._is_nobody
        try:
            async with _client(broker, self._name, self._callbacks.make_will(), self._authority, is_nobody) as client:
                await self._serve(client, broker)
        except (aiomqtt.MqttError, OSError, ValueError) as error:  # the last one of a name or a port that can be none
            if self._was_up and isinstance(error, ValueError):
                raise  # a mistake of our own
            if self._was_up:
                raise MeshError(f"broker {_place(broker)}: the connection broke") from error
            if not is_refusal(error):
                raise MeshError(explain(error, broker)) from error
            if broker.is_offered:
                self._is_nobody = not self._is_nobody  # perhaps it takes who names nobody
            raise _Refusal(explain(error, broker), user="" if is_nobody else broker.user or "") from error

    async def _serve(self, client: Any, broker: Broker) -> None:
        """Take in and send out. What ends the connection is noticed by taking in, whatever the other waits for."""
        self._stale.clear()
        early: deque[Any] = deque(maxlen=MOST_QUEUED)
        tasks = [
            asyncio.create_task(self._take_in(client, early), name="edge-run mesh incoming"),
            asyncio.create_task(self._send_out(client, broker, early), name="edge-run mesh outgoing"),
            asyncio.create_task(self._leave_when_stale(broker), name="edge-run mesh end of a connection"),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(self._outbox.join(), 1.0)
            raise
        finally:
            self.is_up = False
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _leave_when_stale(self, broker: Broker) -> None:
        await self._stale.wait()
        raise MeshError(f"broker {_place(broker)}: hands nothing back that this device says; connecting anew")

    async def _take_in(self, client: Any, early: deque[Any]) -> None:
        async for message in client.messages:
            if self.is_up:
                self._hand_on(message)
            else:
                early.append(message)

    def _hand_on(self, message: Any) -> None:
        payload = message.payload
        self._callbacks.on_message(str(message.topic), payload if isinstance(payload, bytes) else b"", message.retain)

    async def _send_out(self, client: Any, broker: Broker, early: deque[Any]) -> None:
        await client.subscribe([(topic, 1) for topic in self._topics])
        self.is_up = self._was_up = True
        self._callbacks.on_change(True, _place(broker))
        while early:
            self._hand_on(early.popleft())
        while self.is_up:
            message = await self._outbox.get()
            try:
                await client.publish(
                    str(message.topic), message.payload, qos=int(message.is_confirmed), retain=message.is_kept
                )
            finally:
                self._outbox.task_done()


def _client(broker: Broker, name: str, will: Outgoing, authority: str | None, is_nobody: bool) -> Any:
    """Return an MQTT client for one connection. is_nobody: it names no user."""
    aiomqtt = need("aiomqtt", MESH)
    return aiomqtt.Client(
        broker.host,
        broker.port,
        identifier=name,
        username=None if is_nobody else broker.user,
        password=None if is_nobody else broker.password,
        keepalive=KEEPALIVE_S,
        timeout=CONFIRM_S,
        max_queued_incoming_messages=MOST_QUEUED,
        will=aiomqtt.Will(str(will.topic), will.payload, qos=1),
        tls_context=ssl.create_default_context(cafile=authority) if broker.is_tls else None,
    )


def _place(broker: Broker) -> str:
    """Return the address of a broker, for messages: without the password."""
    return place_text(broker.host, broker.port)


def explain(error: BaseException, broker: Broker) -> str:
    """Return why there is no connection to `broker`, and what to do, in one line."""
    place = f"broker {_place(broker)}"
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    if is_refusal(error):
        is_named = broker.user and not broker.is_offered
        who = f"refuses user {broker.user!r}" if is_named else "takes nobody without a user and password that it knows"
        return f"{place}: {who}; put them into its address, as mqtt://USER:PASSWORD@{broker.host}"
    for one in causes:
        if isinstance(one, ssl.SSLError):
            advice = "`edge-run mesh join --authority FILE.pem` names who vouches for it"
            return f"{place}: no TLS with it ({one}); {advice}"
        if isinstance(one, ConnectionRefusedError):
            return (
                f"{place}: nothing listens there; start it, or let it listen on that address and not on loopback only"
            )
        if isinstance(one, (socket.gaierror, UnicodeError)):
            return f"{place}: the name is unknown; use the address in numbers, or see to the name service"
        if isinstance(one, (TimeoutError, asyncio.TimeoutError)) or "timed out" in str(one).lower():
            return f"{place}: does not answer; a firewall may block port {broker.port}, or the address is wrong"
    if "disconnect" in str(error).lower():
        return f"{place}: ended the connection; it is starting anew, or its access list forbids the topics edge/v1/#"
    return f"{place}: {' '.join(str(error).split()) or type(error).__name__}"


def is_refusal(error: BaseException) -> bool:
    """Whether a broker said that it does not know the user or the password."""
    code = getattr(getattr(error, "rc", None), "value", getattr(error, "rc", None))
    return code in (4, 5, 134, 135) or "authorized" in str(error).lower() or "bad user" in str(error).lower()


def check_authority(path: str | None) -> None:
    """Raise ConfigError where the PEM file of a broker's authority cannot be used."""
    if path is not None:
        try:
            ssl.create_default_context(cafile=path)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"--authority {path}: is no PEM file of a certificate ({error})") from error
