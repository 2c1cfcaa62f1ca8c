// Numbers in words. Pure.

export const NONE = "–";

export function count(value) {
  return value === null || value === undefined ? NONE : value.toLocaleString("en");
}

/** Powers of ten, as the command line says them. */
export function bytes(value) {
  if (value === null || value === undefined) return NONE;
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 999.5 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${value.toFixed(unit < 3 ? 0 : 1)} ${units[unit]}`;
}

export function rate(value) {
  if (value === null) return NONE;
  return value > 0 && value < 10 ? value.toFixed(1) : Math.round(value).toLocaleString("en");
}

export function percent(value) {
  if (value === null || Number.isNaN(value)) return NONE;
  const hundred = value * 100;
  return `${hundred > 0 && hundred < 10 ? hundred.toFixed(1) : Math.round(hundred)} %`;
}

export function seconds(value) {
  if (value === null) return NONE;
  return value < 1 ? `≈ ${Math.round(value * 1000)} ms` : `≈ ${value.toFixed(value < 10 ? 2 : 0)} s`;
}
