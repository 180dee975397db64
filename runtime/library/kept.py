"""What an open runtime keeps from one call to the next."""

from collections.abc import Callable

from ..closing import Closing
from ..config.profiles import BackendTable
from ..plan.cost.calibration import TypicalLoad
from ..plan.cost.rates import MachineRates
from ..store.reader import Reader
from ..stream.kept_weights import KeptWeights


class RuntimeCache(Closing):
    """The weights that sessions hold whole, the reader of the others, and the rates that were measured.

    `open_reader` is called for the first reader, and for another one where a call has failed and left reads behind.
    """

    def __init__(self, open_reader: Callable[[], Reader]):
        self.weights = KeptWeights()
        self._open_reader = open_reader
        self._reader: Reader | None = None
        self._rates: list[tuple[TypicalLoad, frozenset[int], BackendTable, MachineRates]] = []

    def close(self) -> None:
        self.close_reader()
        self.weights.clear()

    def reader(self) -> Reader:
        """The reader, which stays open."""
        if self._reader is None:
            self._reader = self._open_reader()
        return self._reader

    def close_reader(self) -> None:
        """Closes the reader; the next call opens another."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def rates(self, load: TypicalLoad, paged: frozenset[int], backends: BackendTable) -> MachineRates | None:
        """Rates that were measured with these backends for a load that covers this one."""
        found = (rates for usual, *rest, rates in self._rates if rest == [paged, backends] and usual.covers(load))
        return next(found, None)

    def keep_rates(self, load: TypicalLoad, paged: frozenset[int], backends: BackendTable, rates: MachineRates) -> None:
        self._rates.append((load, paged, backends, rates))

    def forget_rates(self) -> None:
        """Drops the rates, as the model is computed in another way from now on."""
        self._rates.clear()
