"""Apply the catalogue's rows on import: `from verl_patches import prelude_patch` is the only import with a side effect.

It should come before the first import of upstream; rows on a module that is being imported right now wait until the
import of that module has ended. Importing it again, in any way, changes nothing.
"""

from verl_patches.catalog import platform_rows
from verl_patches.errors import ConfigError
from verl_patches.patching.engine import start_engine
from verl_patches.patching.hooks import after_import
from verl_patches.patching.switches import switches_from_environment
from verl_patches.platform import load_emulation, require_platform
from verl_patches.trainer.worker_settings import prepare_as_sent

_switches = switches_from_environment()
require_platform(_switches.platform)
_rows = platform_rows(_switches.platform)
engine = start_engine(_rows, _switches)
if not any(_switches.line in row.lines for row in _rows):
    raise ConfigError(
        f"the catalogue has no row for line {_switches.line}, so nothing would be patched; expected a line with rows: "
        f'set VERL_PATCHES="line=pypi,platform={_switches.platform}" (the launcher takes the line from recipe.line)'
    )
engine.apply()
if (_emulator := load_emulation(_switches.platform)) is not None:
    _emulator.start_device(_switches.platform)
after_import("verl", prepare_as_sent)
