"""DeepSpeed's JSON configuration: every key read, and honoured, explained or refused.

`to_gin.to_gin` writes the gin file that one stands for; it is imported by itself, since it needs gin.
"""

from zerojax.config.deepspeed.optimizer import make_optimizer as make_optimizer
from zerojax.config.deepspeed.optimizer import make_schedule as make_schedule
from zerojax.config.deepspeed.reader import RawConfig as RawConfig
from zerojax.config.deepspeed.reader import read as read
from zerojax.config.deepspeed.resolve import resolve as resolve
from zerojax.config.deepspeed.resolved import DeepSpeedConfig as DeepSpeedConfig
from zerojax.config.deepspeed.table import markdown_table as markdown_table
