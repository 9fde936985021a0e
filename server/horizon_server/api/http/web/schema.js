/** The job spec's JSON Schema as the fields of a form: their kinds, defaults, and texts to and from values. */

const deref = (schema, node) => (node.$ref ? schema.$defs[node.$ref.split("/").pop()] : node);

/** The part of a field's schema that is not null, and whether it may be null. */
function unwrapped(schema, node) {
  if (!node.anyOf) return { node: deref(schema, node), nullable: false };
  const others = node.anyOf.filter((one) => one.type !== "null");
  return {
    node: others.length === 1 ? deref(schema, others[0]) : { type: "any" },
    nullable: others.length < node.anyOf.length,
  };
}

/** The values of a spec in which nothing is set. */
export function defaultsOf(schema, of = schema, given = {}) {
  const values = {};
  for (const [name, property] of Object.entries(of.properties)) {
    const { node, nullable } = unwrapped(schema, property);
    const outer = given[name] ?? property.default;
    if (node.properties && !nullable) values[name] = defaultsOf(schema, node, outer || {});
    else if (outer !== undefined) values[name] = outer;
  }
  return values;
}

/**
 * @typedef {{path: string, name: string, description: string,
 *   kind: "choice"|"boolean"|"integer"|"number"|"text"|"json",
 *   choices?: string[], nullable: boolean, required: boolean, allowed: string, initial: any}} Field
 * @typedef {{path: string, description: string, optional: boolean, fields: Field[]}} Section
 */

/** Sections of fields: that of the spec itself first, then one for each group. @returns {Section[]} */
export function sectionsOf(schema) {
  const defaults = defaultsOf(schema);
  const sections = [];
  const walk = (of, path, optional, given) => {
    const section = { path, description: of.description || "", optional, fields: [] };
    sections.push(section);
    for (const [name, property] of Object.entries(of.properties)) {
      const { node, nullable } = unwrapped(schema, property);
      const inner = path ? `${path}.${name}` : name;
      if (node.properties) walk(node, inner, nullable, given?.[name] || defaultsOf(schema, node));
      else section.fields.push(fieldOf(name, inner, property, node, nullable, of, given));
    }
  };
  walk(schema, "", false, defaults);
  return sections;
}

function fieldOf(name, path, property, node, nullable, of, given) {
  const kind = node.enum
    ? "choice"
    : { boolean: "boolean", integer: "integer", number: "number", string: "text" }[node.type] || "json";
  const choices = node.enum && [...new Set(node.enum.map(String))];
  return {
    path,
    name,
    description: property.description || node.description || "",
    kind,
    choices,
    nullable,
    required: (of.required || []).includes(name),
    allowed: allowedOf(property, node),
    initial: given?.[name],
  };
}

function allowedOf(property, node) {
  const told = property["x-allowed"] || node["x-allowed"];
  if (told) return told;
  const low = node.minimum ?? node.exclusiveMinimum;
  const high = node.maximum ?? node.exclusiveMaximum;
  const parts = [];
  if (low !== undefined) parts.push(`${node.minimum === undefined ? "above" : "at least"} ${low}`);
  if (high !== undefined) parts.push(`${node.maximum === undefined ? "below" : "at most"} ${high}`);
  return parts.join(", ");
}

/** A value as the text of its field; null is an empty text. */
export function textOf(field, value) {
  if (value === null || value === undefined) return "";
  return field.kind === "json" ? JSON.stringify(value) : String(value);
}

/** The value of a text. Throws an Error that says what is wrong. */
export function valueOf(field, text) {
  const trimmed = text.trim();
  if (trimmed === "") {
    if (field.nullable) return null;
    if (field.required) throw new Error(`${field.path} is needed`);
    if (field.kind === "text") return "";
    throw new Error(`${field.path} is empty`);
  }
  if (field.kind === "boolean") return trimmed === "true";
  if (field.kind === "integer" || field.kind === "number") {
    const number = Number(trimmed);
    if (!Number.isFinite(number)) throw new Error(`${field.path} is ${trimmed}; it must be a number`);
    if (field.kind === "integer" && !Number.isInteger(number))
      throw new Error(`${field.path} is ${trimmed}; it must be a whole number`);
    return number;
  }
  if (field.kind !== "json") return trimmed;
  try {
    return JSON.parse(trimmed);
  } catch {
    throw new Error(`${field.path} is not JSON, such as ["all"] or {"name": "dataset"}`);
  }
}

/** The value at a dotted path, or undefined. */
export const at = (values, path) => path.split(".").reduce((inner, name) => inner?.[name], values);

/** Set the value at a dotted path, and what is above it. */
export function put(values, path, value) {
  const names = path.split(".");
  const last = names.pop();
  let inner = values;
  for (const name of names) inner = inner[name] ??= {};
  inner[last] = value;
}
