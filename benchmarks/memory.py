"""draft"""
import argparse, itertools, json, os, sys, time
from pathlib import Path
sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks import topology
topology.prepare(8)
import jax, jax.numpy as jnp, numpy as np, optax
from flax import nnx
from jax.sharding import Mesh
import zerojax
from zerojax.models.gpt import GPT, next_token_loss
SIZES = dict(vocab_size=50304, dim=2048, layers=24, heads=16, max_length=1024)
ROWS=16
OFF={"":(),"optimizer":("optimizer",),"optimizer+params":("optimizer","params")}
def measure(mesh, stage, remat, offload, precision, chunks):
    zero = zerojax.Zero(stage=stage, mesh=mesh, precision=precision, remat=remat, offload=OFF[offload])
    state = zero.abstract_state(lambda key: GPT(**SIZES, rngs=nnx.Rngs(key)), optax.adamw(1e-3))
    loss = lambda m,b,r: next_token_loss(m,b,r,chunks)
    c = zero.train_step(loss).lower(state, {"tokens": jax.ShapeDtypeStruct((ROWS, SIZES["max_length"]+1), jnp.int32)}).compile()
    m = c.memory_analysis()
    return {"arguments": m.argument_size_in_bytes, "temporaries": m.temp_size_in_bytes, "unaliased": m.output_size_in_bytes-m.alias_size_in_bytes,
            "host_arguments": m.host_argument_size_in_bytes, "host_temporaries": m.host_temp_size_in_bytes}
rows=[]
for s in range(4):
    rows += [(s,"none","","fp32",None),(s,"full","","fp32",None),(s,"none","","bf16",None),(s,"dots","","bf16",None),(s,"full","","bf16",None),(s,"full","optimizer","bf16",None),(s,"full","optimizer+params","bf16",None),(s,"offload","optimizer+params","bf16",None),(s,"full","","bf16",8)]
rows += [(3,"full","","fp16",None)]
rows=sorted(rows,key=lambda r:({3:0,1:1,2:2,0:3}[r[0]], r[2]!="", r[3]=="fp16"))
path=Path("benchmarks/memory.json"); out=json.loads(path.read_text()) if path.exists() else {}
mesh=Mesh(np.array(topology.h100(8)),("data",))
for r in rows:
    key=",".join(map(str,r))
    if key in out: continue
    t=time.time()
    try: out[key]=measure(mesh,*r)|{"seconds":round(time.time()-t)}
    except Exception as e: print(key,type(e),str(e)[:300],flush=True); continue
    print(key,out[key],flush=True)
    path.write_text(json.dumps(out,indent=0))
