"""Hostile programs, one list per surface; ``ATTACKS`` holds them all."""

from attacks.artefact import ARTEFACT
from attacks.box import BOX
from attacks.information import INFORMATION
from attacks.process import PROCESS
from attacks.value import VALUE

ATTACKS = (*ARTEFACT, *PROCESS, *VALUE, *INFORMATION, *BOX)
