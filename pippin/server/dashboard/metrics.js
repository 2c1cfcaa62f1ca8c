// Prometheus text into numbers. Pure.

/** {values: Map name -> sum over label sets, buckets: Map name -> [[upper bound, count], …]} */
export function parse(text) {
  const values = new Map();
  const buckets = new Map();
  for (const line of text.split("\n")) {
    const match = /^([^\s{#]+)(\{.*\})?\s+(\S+)/.exec(line);
    if (match === null) continue;
    const [, name, labels, number] = match;
    const value = Number(number);
    values.set(name, (values.get(name) ?? 0) + value);
    const bound = name.endsWith("_bucket") ? /[{,]le="([^"]+)"/.exec(labels ?? "") : null;
    if (bound !== null) {
      const upper = bound[1] === "+Inf" ? Infinity : Number(bound[1]);
      const sums = buckets.get(name) ?? new Map();
      sums.set(upper, (sums.get(upper) ?? 0) + value);
      buckets.set(name, sums);
    }
  }
  const sorted = new Map();
  for (const [name, sums] of buckets) {
    sorted.set(name, [...sums].sort((a, b) => a[0] - b[0]));
  }
  return { values, buckets: sorted };
}

/** As Prometheus' histogram_quantile: linear inside a bucket. Null without observations. */
export function quantile(buckets, q) {
  const total = buckets?.at(-1)?.[1] ?? 0;
  if (total === 0) return null;
  const rank = q * total;
  let lower = 0;
  let before = 0;
  for (const [upper, count] of buckets) {
    if (count >= rank) {
      if (upper === Infinity) return lower;
      return lower + ((upper - lower) * (rank - before)) / (count - before);
    }
    lower = upper;
    before = count;
  }
  return lower;
}
