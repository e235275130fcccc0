"""Both halves of the Flower app: Thinwire's, with the plan beside this file."""

from pathlib import Path

from thinwire.flower.stock.folding_app import server_app
from thinwire.flower.stock.training_app import client_app

server = server_app(Path(__file__).with_name("plan.toml"))
client = client_app()
