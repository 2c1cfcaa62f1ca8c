// The chat box: one conversation, streamed.

import { refusal, request, Unauthorized } from "./api.js";

const byId = (id) => document.getElementById(id);

/** The data of each event of a stream of server-sent events. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      if (block.startsWith("data: ")) yield block.slice(6);
    }
  }
}

export class Chat {
  /** onUnauthorized is called when the server wants another key. */
  constructor(onUnauthorized) {
    this.onUnauthorized = onUnauthorized;
    this.model = null;
    this.messages = [];
    this.running = null;
    this.log = byId("messages");
    this.prompt = byId("prompt");
    byId("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.send();
      }
    });
    byId("chat").addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.stop();
    });
    byId("stop").addEventListener("click", () => this.stop());
    byId("clear").addEventListener("click", () => this.clear());
  }

  stop() {
    this.running?.abort();
  }

  clear() {
    this.stop();
    this.messages = [];
    this.log.replaceChildren(this.log.querySelector("#empty") ?? "");
    for (const node of this.log.querySelectorAll(".message")) node.remove();
    this.complain(null);
    this.prompt.focus();
  }

  complain(text) {
    const problem = byId("problem");
    problem.textContent = text ?? "";
    problem.hidden = text === null;
  }

  add(role, text) {
    const node = document.createElement("div");
    node.className = `message ${role}`;
    for (const [part, content] of [["who", role === "user" ? "You" : "Model"], ["text", text], ["foot", ""]]) {
      const span = document.createElement("span");
      span.className = part;
      span.textContent = content;
      node.append(span);
    }
    this.log.append(node);
    this.log.scrollTop = this.log.scrollHeight;
    return node;
  }

  async send() {
    const text = this.prompt.value.trim();
    if (text === "" || this.running !== null) return;
    byId("empty").hidden = true;
    this.complain(null);
    this.prompt.value = "";
    const conversation = this.messages;
    conversation.push({ role: "user", content: text });
    const asked = this.add("user", text);
    const node = this.add("assistant", "");
    const control = new AbortController();
    this.busy(control, node);
    let answer = "";
    try {
      answer = await this.stream(conversation, control.signal, node);
    } catch (error) {
      answer = node.querySelector(".text").textContent;
      if (!control.signal.aborted) this.explain(error);
    } finally {
      this.busy(null, node);
    }
    if (conversation !== this.messages) return; // a new chat has begun
    if (answer !== "") {
      conversation.push({ role: "assistant", content: answer });
      if (control.signal.aborted) node.querySelector(".foot").textContent = "stopped";
      return;
    }
    // Nothing came: take the question back, so that it can be sent again.
    conversation.pop();
    node.remove();
    asked.remove();
    if (this.prompt.value === "") this.prompt.value = text;
  }

  explain(error) {
    if (error instanceof Unauthorized) {
      this.onUnauthorized();
    } else if (error instanceof TypeError) {
      this.complain("The connection to the server was lost.");
    } else {
      this.complain(error.message);
    }
  }

  busy(control, node) {
    this.running = control;
    const on = control !== null;
    byId("send").disabled = on;
    byId("stop").disabled = !on;
    node.classList.toggle("running", on);
    // Screen readers read the whole answer when it is there, not each token.
    this.log.setAttribute("aria-busy", String(on));
  }

  async stream(messages, signal, node) {
    const started = performance.now();
    const answer = await request("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({
        ...(this.model === null ? {} : { model: this.model }),
        messages,
        temperature: 0.3, // small models ramble at the API's default of 1
        stream: true,
        stream_options: { include_usage: true },
      }),
      signal,
    });
    if (!answer.ok) throw await refusal(answer);
    const text = node.querySelector(".text");
    let first = null;
    let reason = null;
    let usage = null;
    let complete = false;
    for await (const data of events(answer.body)) {
      if (data === "[DONE]") {
        complete = true;
        break;
      }
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      const choice = event.choices?.[0];
      reason = choice?.finish_reason ?? reason;
      usage = event.usage ?? usage;
      const piece = choice?.delta?.content ?? "";
      if (piece !== "") {
        first ??= performance.now();
        const atEnd = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 40;
        text.append(piece);
        if (atEnd) this.log.scrollTop = this.log.scrollHeight;
      }
    }
    if (!complete) throw new Error("The answer broke off: the server ended the stream early.");
    node.querySelector(".foot").textContent = summary(started, first, usage, reason);
    if (text.textContent === "") text.textContent = "(an empty answer)";
    this.log.scrollTop = this.log.scrollHeight;
    return text.textContent;
  }
}

function summary(started, first, usage, reason) {
  const parts = [];
  if (usage !== null) {
    const many = usage.completion_tokens;
    const seconds = (performance.now() - (first ?? started)) / 1000;
    parts.push(`${many} token${many === 1 ? "" : "s"}`);
    if (first !== null) parts.push(`first after ${Math.round(first - started)} ms`);
    if (first !== null && many > 1 && seconds > 0) {
      parts.push(`then ${((many - 1) / seconds).toFixed(1)} tokens/s`);
    }
  }
  if (reason === "length") parts.push("cut at the length limit");
  return parts.join(" · ");
}
