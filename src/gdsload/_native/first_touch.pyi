from typing import final

MODES: dict[str, int]

@final
class HugePages:
    def __new__(cls) -> HugePages: ...
    def prepare(self, region: object, offset: int, nbytes: int) -> None: ...
