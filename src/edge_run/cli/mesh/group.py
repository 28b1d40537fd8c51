"""`edge-run mesh …`: several devices, one model."""

from __future__ import annotations

from edge_run.cli.mesh.change import hand_on, members, remove, role, rotate
from edge_run.cli.mesh.doctor import doctor
from edge_run.cli.mesh.init import init
from edge_run.cli.mesh.invite import invite
from edge_run.cli.mesh.join import join
from edge_run.cli.mesh.status import status
from edge_run.cli.shared.settings_command import CommandGroup

mesh = CommandGroup(
    "mesh",
    "Let several devices run one model together.",
    (init, join, status, doctor, invite, members, remove, role, rotate, hand_on),
)
