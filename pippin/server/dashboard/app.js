// The page: asks the server what it is, then for its metrics once a second.

import { refusal, request, storedKey, storeKey, Unauthorized } from "./api.js";
import { Chat } from "./chat.js";
import * as format from "./format.js";
import { parse, quantile } from "./metrics.js";
import { Sparkline } from "./sparkline.js";

const POLL_MS = 1000;
/** How often, in polls, the facts are asked for again. */
const FACTS_EVERY = 10;
/** Polls further apart than this (a sleeping tab) give no rate. */
const GAP_MS = 5000;

const byId = (id) => document.getElementById(id);
const say = (id, text) => {
  if (byId(id).textContent !== text) byId(id).textContent = text;
};

const lines = {
  generation: new Sparkline(byId("generation-line")),
  prompt: new Sparkline(byId("prompt-line")),
  running: new Sparkline(byId("running-line")),
  kv: new Sparkline(byId("kv-line"), 1),
};
const chat = new Chat(() => askForKey());
let capacity = null;
let factsKnown = false;
let keyRefused = false;
let last = null;
let polls = 0;

// -- the key

function askForKey() {
  const had = storedKey() !== null;
  say(
    "key-text",
    had
      ? "The server did not accept this key. Please try another."
      : "This server asks for a key. It is kept in this tab only, until you close it.",
  );
  byId("key-button").hidden = false;
  if (!byId("key-dialog").open) byId("key-dialog").showModal();
}

byId("key-button").addEventListener("click", askForKey);
byId("key-cancel").addEventListener("click", () => byId("key-dialog").close());
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  storeKey(byId("key").value.trim());
  byId("key").value = "";
  byId("key-dialog").close();
  keyRefused = false;
  loadFacts();
});

// -- the facts

function showState(kind, text) {
  byId("state").dataset.state = kind;
  say("state", text);
}

function showFacts(cluster) {
  const { model } = cluster;
  const [node] = cluster.nodes;
  const [replica] = cluster.replicas;
  const [stage] = replica.stages;
  capacity = model.kv_tokens;
  chat.model = model.name;
  document.title = `${model.name} – Pippin`;
  say("version", cluster.version);
  const note = model.max_model_len_note ? ` (${model.max_model_len_note})` : "";
  const memory = node.memory_bytes === null ? "" : `, ${format.bytes(node.memory_bytes)} of memory`;
  const facts = [
    ["Model", `${model.name} (${model.architecture})`],
    ["Weights", `${format.bytes(model.weights_bytes)}, ${model.quantization ?? "not quantised"}`],
    ["Backend", `${node.backend}: ${model.backend_reason}`],
    ["Device", `${node.device}, ${model.dtype}`],
    ["Context", `${format.count(model.max_model_len)} tokens a request${note}`],
    ["KV cache", `${format.count(model.kv_tokens)} tokens in ${format.bytes(model.kv_bytes)}`],
    ["Machine", `${node.name}${memory}`],
    ["Process", `${stage.pid}`],
  ];
  byId("facts").replaceChildren(
    ...facts.flatMap(([title, text]) => {
      const dt = document.createElement("dt");
      const dd = document.createElement("dd");
      dt.textContent = title;
      dd.textContent = text;
      return [dt, dd];
    }),
  );
  if (replica.state === "up") showState("good", "Serving");
  else showState("bad", replica.reason ?? replica.state);
}

async function loadFacts() {
  try {
    const answer = await request("api/cluster");
    if (!answer.ok) throw await refusal(answer);
    showFacts(await answer.json());
    factsKnown = true;
    byId("key-button").hidden = true;
  } catch (error) {
    factsKnown = false;
    if (error instanceof Unauthorized) {
      showState("wait", "The server asks for an API key");
      keyRefused = true;
      askForKey();
    } else {
      lost(error);
    }
  }
}

function lost(error) {
  factsKnown = false;
  last = null;
  showState("bad", error instanceof TypeError ? "No connection to the server" : error.message);
}

// -- the metrics

function showMetrics({ values, buckets }, now) {
  const read = (name) => values.get(`vllm:${name}`) ?? 0;
  const usage = read("kv_cache_usage_perc");
  const running = read("num_requests_running");
  say("running", format.count(running));
  say("waiting", format.count(read("num_requests_waiting")));
  say("kv-usage", format.percent(usage));
  say(
    "kv-tokens",
    capacity === null
      ? "\u00a0"
      : `about ${format.count(Math.round(usage * capacity))} of ${format.count(capacity)} tokens`,
  );
  lines.running.push(running);
  lines.kv.push(usage);

  const first = buckets.get("vllm:time_to_first_token_seconds_bucket");
  say("ttft-50", format.seconds(quantile(first, 0.5)));
  say("ttft-95", format.seconds(quantile(first, 0.95)));
  const queries = read("prefix_cache_queries_total");
  say("hit-rate", queries ? format.percent(read("prefix_cache_hits_total") / queries) : format.NONE);

  const totals = { generation: read("generation_tokens_total"), prompt: read("prompt_tokens_total") };
  const seconds = last === null || now - last.now > GAP_MS ? null : (now - last.now) / 1000;
  for (const [kind, total] of Object.entries(totals)) {
    const line = lines[kind];
    const gained = seconds === null ? -1 : total - last.totals[kind];
    if (gained < 0) {
      say(`${kind}-rate`, format.NONE); // the first look, or a server that began anew
      continue;
    }
    line.push(gained / seconds);
    say(`${kind}-rate`, format.rate(gained / seconds));
    say(`${kind}-peak`, `peak ${format.rate(line.peak)} in the last two minutes`);
  }
  last = { now, totals };
}

async function poll() {
  const begun = performance.now();
  if (!document.hidden) {
    if ((!factsKnown || polls % FACTS_EVERY === 0) && !keyRefused) await loadFacts();
    polls += 1;
    try {
      const answer = await request("metrics", { signal: AbortSignal.timeout(GAP_MS) });
      if (!answer.ok) throw await refusal(answer);
      showMetrics(parse(await answer.text()), performance.now());
    } catch (error) {
      lost(error);
    }
  }
  setTimeout(poll, Math.max(0, POLL_MS - (performance.now() - begun)));
}

poll();
