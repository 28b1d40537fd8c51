"""`edge-run mesh …`: several devices, one model."""

from __future__ import annotations

from edge_run.cli.commands import CommandGroup
from edge_run.cli.mesh_change import hand_on, members, remove, role, rotate
from edge_run.cli.mesh_doctor import doctor
from edge_run.cli.mesh_init import init
from edge_run.cli.mesh_invite import invite
from edge_run.cli.mesh_join import join
from edge_run.cli.mesh_status import status

mesh = CommandGroup(
    "mesh",
    "Let several devices run one model together.",
    (init, join, status, doctor, invite, members, remove, role, rotate, hand_on),
)
