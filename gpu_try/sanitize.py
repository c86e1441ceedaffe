"""Runs SANITIZER_CASES under memcheck, racecheck and synccheck, the three at once; a tool that a case ends goes on with the next.

$OUT/sanitizer/TOOL.log has all that was said, $OUT/sanitizer.json and standard output a line a case. BUDGET: seconds for all (90). A case gets 25 s.
"""
import json, os, subprocess, sys, threading, time
from pathlib import Path
HERE = Path(__file__).resolve().parent; OUT = Path(os.environ.get("OUT", ".")); (OUT / "sanitizer").mkdir(parents=True, exist_ok=True)
sys.path.insert(0, str(HERE)); from cases import SANITIZER_CASES
NAMES = [k["name"] for k in SANITIZER_CASES(lambda name, **k: {"name": name})]; TOOLS = sys.argv[1:] or ["memcheck", "racecheck", "synccheck"]; RESULTS = []; END = time.time() + float(os.environ.get("BUDGET", "90"))
def tool_run(tool):
    i = 0
    with open(OUT / "sanitizer" / f"{tool}.log", "w") as log:
        while i < len(NAMES) and time.time() < END - 2:
            command = ["compute-sanitizer", "--tool", tool, "--print-limit", "3", sys.executable, str(HERE / "try.py"), "--child", str(i), str(len(NAMES))]
            child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "SMALL": "1"})
            last = [time.time()]; at = [i - 1]; said = []; first = i
            def end(line_at, ok, r=None): RESULTS.append({"tool": tool, "case": NAMES[line_at], "ok": ok, "said": said[:8], **({"result": r} if r else {})}); print("ok " if ok else "BAD", tool, NAMES[line_at], "" if ok else " | ".join(said[:4])[:600], f"{time.time() - last[0]:.1f} s", flush=True); said.clear()
            def pump():
                for line in child.stdout:
                    log.write(line); log.flush()
                    try: d = json.loads(line)
                    except ValueError:
                        t = line.strip().lstrip("= ").strip()
                        if t and t != "COMPUTE-SANITIZER" and "Host Frame" not in t and "SUMMARY" not in t: said.append(t)
                        continue
                    if "at" in d: at[0] = d["at"]; last[0] = time.time()
                    else: end(d["case"], bool(d["ok"]) and not said, d); at[0] = d["case"]; done.add(d["case"])
            done = set(); th = threading.Thread(target=pump); th.start()
            while th.is_alive():
                th.join(0.2)
                if time.time() - last[0] > 25 or time.time() > END: child.kill()
            code = child.wait(); i = max(at[0], first) + 1
            if at[0] >= 0 and at[0] not in done or (at[0] < first and not done): end(max(at[0], first), False)
            elif said: end(max(at[0], first), False)  # errors that the tool counted behind the last case
            log.write(f"--- exit status {code}\n"); json.dump(RESULTS, open(OUT / "sanitizer.json", "w"), indent=1)
        if i < len(NAMES): print("no time left:", tool, NAMES[i:], flush=True)
threads = [threading.Thread(target=tool_run, args=(t,)) for t in TOOLS]
for t in threads: t.start()
for t in threads: t.join()
json.dump(RESULTS, open(OUT / "sanitizer.json", "w"), indent=1); print(f"{len(RESULTS)} results, {sum(not r['ok'] for r in RESULTS)} bad")
