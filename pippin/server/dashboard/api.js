// Requests to this server, with the key of this tab. Addresses are relative to the page.

const STORED = "pippin-api-key";

export class Unauthorized extends Error {}

export function storedKey() {
  return sessionStorage.getItem(STORED);
}

export function storeKey(key) {
  sessionStorage.setItem(STORED, key);
}

export function request(path, options = {}) {
  const headers = { ...options.headers };
  const key = storedKey();
  if (key !== null) headers.Authorization = `Bearer ${key}`;
  return fetch(path, { ...options, headers, cache: "no-store" });
}

/** The error of an answer that is not 200, in words for a person. */
export async function refusal(answer) {
  const body = await answer.json().catch(() => null);
  const message = body?.error?.message ?? `The server answered ${answer.status}.`;
  if (answer.status === 401) return new Unauthorized(message);
  if (answer.status === 429) {
    const wait = Number(answer.headers.get("retry-after"));
    const when = wait > 0 ? `in about ${wait} s` : "in a moment";
    return new Error(`The server has as much to do as it can take. Please try again ${when}.`);
  }
  if (answer.status === 503) return new Error(`The server cannot answer just now. ${message}`);
  return new Error(message);
}
