from .catalogue import DETECTORS as DETECTORS
from .catalogue import Detector as Detector
from .catalogue import Look as Look
